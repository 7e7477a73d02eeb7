package protocol

import "time"

// The apiVersion and kind of Usage in JSON. Within one version, fields can be added, but never renamed or changed in meaning.
const (
	UsageAPIVersion = "usage.gpushare.aliyun.com/v1"
	UsageKind       = "GPUShareUsage"
)

// PortUsage is the name of the device plugin's port at which the plugin serves Usage, on loopback.
const PortUsage = "usage"

// Usage is the measured GPU memory of one node, as its device plugin serves it. All amounts are bytes. Cards are sorted by
// index, containers by card, namespace, pod and name.
type Usage struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Node       string `json:"node"`
	// Time is when the driver was read; zero if it has not been read yet. IntervalSeconds is the time between two readings.
	Time            time.Time `json:"time"`
	IntervalSeconds float64   `json:"intervalSeconds"`
	// Problems are what could not be measured, in words.
	Problems   []string         `json:"problems"`
	Cards      []CardUsage      `json:"cards"`
	Containers []ContainerUsage `json:"containers"`
}

// CardUsage is the measured memory of one card.
type CardUsage struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	// Used is the card's memory in use as the driver reports it, including what the driver itself needs.
	Used uint64 `json:"used"`
	// Free is the memory that can be allocated, as the driver reports it; nil if it reports none, as for a card that shares the machine's memory.
	Free *uint64 `json:"free,omitempty"`
	// Pods is the memory of processes of pods, Host that of processes that belong to no pod, and Unresolved that of processes
	// that could not be found, because they had ended or because the plugin doesn't see the host's processes.
	Pods       uint64 `json:"pods"`
	Host       uint64 `json:"host"`
	Unresolved uint64 `json:"unresolved"`
	// MPS is what the driver attributes to the card's MPS server and not to a client.
	MPS uint64 `json:"mps,omitempty"`
	// Incomplete is true if it isn't known of all processes of pods how much memory they use, or to which pod they belong.
	Incomplete bool `json:"incomplete,omitempty"`
	// Problem is why the card could not be measured; empty if it was.
	Problem string `json:"problem,omitempty"`
}

// ContainerUsage is the measured memory of one container on one card.
type ContainerUsage struct {
	// Namespace and Pod are empty for a pod that the API server doesn't show. Container is empty for processes of a pod that
	// belong to none of the containers that the API server shows as running.
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"uid"`
	Container string `json:"container"`
	Card      int    `json:"card"`
	Processes int    `json:"processes"`
	// Used is the sum of its processes' memory or, if that is more, what the driver counts for its cgroup.
	Used uint64 `json:"used"`
	// Requested is what the container requests of this card; 0 on a card that it was not given.
	Requested uint64 `json:"requested"`
	// Allowed is what the container may use of this card by its annotated limit, if that is more than it requests; else 0.
	Allowed uint64 `json:"allowed,omitempty"`
	// Limit is the limit that the driver enforces for the container on this card; nil if there is none, or none is known.
	Limit *uint64 `json:"limit,omitempty"`
	// Given is the limit that the container was given at its start; nil if its share isn't enforced. NotInForce is why that limit
	// is not in force; empty if it is. NotRead is true if that is not known, because the limit of its cgroup could not be read.
	Given      *uint64 `json:"given,omitempty"`
	NotInForce string  `json:"notInForce,omitempty"`
	NotRead    bool    `json:"notRead,omitempty"`
	// Incomplete is true if the driver doesn't report the memory of some of its processes.
	Incomplete bool `json:"incomplete,omitempty"`
}

// ExceedsAllowance reports whether the container uses more than it may.
func (c ContainerUsage) ExceedsAllowance() bool { return c.Used > c.Allowance() }

// Allowance is what the container may use: its limit, or what it requests.
func (c ContainerUsage) Allowance() uint64 { return max(c.Allowed, c.Requested) }

// Borrowed is what the container uses above its request, and may use as long as the card has memory to spare.
func (c ContainerUsage) Borrowed() uint64 {
	return max(min(c.Used, c.Allowed), c.Requested) - c.Requested
}
