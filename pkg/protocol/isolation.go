package protocol

import "strings"

// The isolation modes: how a node enforces the shares of its cards.
const (
	// IsolationNone enforces nothing: containers read their share from the environment. The inventory of such a node names no mode.
	IsolationNone = "none"
	// IsolationDriver has NVIDIA's driver limit the memory of each container's cgroup (R615 and later).
	IsolationDriver = "driver"
	// IsolationMPS has a daemon of NVIDIA's Multi-Process Service for each card, which limits each process.
	IsolationMPS = "mps"
)

// IsolationRules are what an isolation mode means for the pods of a node. The device plugin, the extender, its page and kubectl inspect ask them.
type IsolationRules struct {
	Mode string
	// Limits is true if the mode limits memory: a node's cards then have only the memory that can be allocated. Cores is true if it limits
	// computing too.
	Limits, Cores bool
	// OneCard is true if a container can have one card only, NoOwnSharedMemory if its pod can have no volume at SharedMemory, and
	// NoLimitAboveRequest if it can have no limit above its request.
	OneCard, NoOwnSharedMemory, NoLimitAboveRequest bool
}

// isolationModes are all modes.
var isolationModes = []IsolationRules{
	{Mode: IsolationNone},
	{Mode: IsolationDriver, Limits: true},
	// A container can be a client of one daemon only, and mounts the daemon's shared memory. The driver attributes the memory of all clients to the
	// server, so it is not known which of them uses more than its request.
	{Mode: IsolationMPS, Limits: true, Cores: true, OneCard: true, NoOwnSharedMemory: true, NoLimitAboveRequest: true},
}

// IsolationModes returns the names of all modes.
func IsolationModes() []string {
	var names []string
	for _, rules := range isolationModes {
		names = append(names, rules.Mode)
	}
	return names
}

// RulesOfIsolation returns the rules of a mode. Those of a mode that isn't known forbid nothing: a later device plugin can have named it.
func RulesOfIsolation(mode string) IsolationRules {
	for _, rules := range isolationModes {
		if rules.Mode == mode {
			return rules
		}
	}
	return IsolationRules{}
}

// PodIsolation is the value of a pod's AnnotationIsolation. The zero value is that of a pod without the annotation.
type PodIsolation struct {
	// Mode is the isolation mode in which the pod's containers were started.
	Mode string
	// Problem is which limit is not in force and why; empty if all are.
	Problem string
}

// String returns the annotation's value.
func (p PodIsolation) String() string {
	if p.Problem == "" {
		return p.Mode
	}
	return p.Mode + ": " + p.Problem
}

// ParsePodIsolation parses a pod's annotation, and shortens its texts.
func ParsePodIsolation(annotations map[string]string) PodIsolation {
	mode, problem, _ := strings.Cut(annotations[AnnotationIsolation], ":")
	return PodIsolation{Mode: Shorten(mode), Problem: Shorten(strings.TrimSpace(problem))}
}
