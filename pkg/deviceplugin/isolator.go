package deviceplugin

import (
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/usage"
)

// errNotAsked is the reason for a card of which the driver has not said yet whether it can limit its memory.
var errNotAsked = errors.New("the driver has not been asked yet whether it can limit memory")

// Driver is what the plugin asks the driver about memory and limits; inventory.Session implements it.
type Driver interface {
	usage.Driver
	Compute(uuid string) (inventory.Compute, error)
}

// answer is what the driver says about a card.
type answer struct {
	// unlimitable is why it can't limit memory of the card.
	unlimitable error
	compute     inventory.Compute
	// unreadable is why compute isn't known.
	unreadable error
}

// cardIsolation is what an isolation mode means for a card.
type cardIsolation struct {
	// notReady is why no container can start there; empty if one can.
	notReady string
	// maxContainers is how many containers can have a share of the card; 0 if there is no such bound.
	maxContainers int
}

// isolator decides in which isolation mode new containers start, and which cards are ready for it. A change of the mode counts for
// new containers only: the kubelet starts a container again with what it was given first.
type isolator struct {
	cards    *cardState
	visible  VisibleDevices
	backends *isolation.Backends
	// cgroups is the hierarchy of cgroups, of which the driver is asked.
	cgroups string

	// mu guards the fields below.
	mu sync.Mutex
	// known is true once the Node object was read. Before that no mode is in force.
	known bool
	// runtime is the node's container runtime.
	runtime string
	// label is the node's label, which takes precedence; nil if it has none. configured is the mode of a node without it.
	label      *string
	configured isolation.Mode
	// mode is the one in force. invalid is why the node's label names no mode: no new container can start then.
	mode    isolation.Mode
	invalid error
	// answers are the driver's answers, by the card's UUID.
	answers map[string]answer
}

// SetNode reads the node's label and container runtime.
func (i *isolator) SetNode(node *corev1.Node) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.known, i.label, i.runtime = true, nil, node.Status.NodeInfo.ContainerRuntimeVersion
	if label, labelled := node.Labels[protocol.LabelIsolation]; labelled {
		i.label = &label
	}
	i.refresh()
}

// Configure sets the mode of a node without the label.
func (i *isolator) Configure(mode isolation.Mode) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.configured = mode
	i.refresh()
}

// Ask asks the driver about each card.
func (i *isolator) Ask(driver Driver) {
	answers := map[string]answer{}
	for _, uuid := range driver.Cards() {
		var a answer
		_, a.unlimitable = driver.Limit(uuid, i.cgroups)
		if errors.Is(a.unlimitable, inventory.ErrUnsupported) {
			a.unlimitable = errors.New("the driver can't limit its memory: R615 or later is needed")
		}
		a.compute, a.unreadable = driver.Compute(uuid)
		answers[uuid] = a
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.answers = answers
	i.refresh()
}

// Refresh decides again which cards are ready, after a change of the cards.
func (i *isolator) Refresh() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.refresh()
}

// refresh decides about the mode, and brings the cards in line with it. The caller holds mu.
func (i *isolator) refresh() {
	if !i.known {
		return
	}
	i.mode, i.invalid = i.configured, nil
	if i.label != nil {
		var err error
		if i.mode, err = isolation.ParseMode(*i.label); err != nil {
			i.mode, i.invalid = isolation.None, fmt.Errorf("label %s of the node: %w", protocol.LabelIsolation, err)
		}
	}
	states := map[int]cardIsolation{}
	for _, card := range i.cards.Get().All {
		state := cardIsolation{maxContainers: i.backends.Of(i.mode).MaxContainers(i.card(card))}
		if err := i.ready(card); err != nil {
			state.notReady = err.Error()
		}
		states[card.Index] = state
	}
	i.cards.SetIsolation(i.mode, states)
}

// ready returns why no new container may start on a card; nil if one may. The caller holds mu.
func (i *isolator) ready(card gpu.Card) error {
	if i.invalid != nil {
		return i.invalid
	}
	err := i.backends.Of(i.mode).Ready(i.card(card))
	if err != nil && i.mode.Rules().Limits {
		err = fmt.Errorf("isolation mode %s: %w", i.mode, err)
	}
	return err
}

// card returns what a backend needs to know. The caller holds mu.
func (i *isolator) card(card gpu.Card) isolation.Card {
	a, asked := i.answers[card.UUID]
	if !asked {
		a = answer{unlimitable: errNotAsked, unreadable: errNotAsked}
	}
	return isolation.Card{
		UUID: card.UUID, Device: i.visible.name(card, i.cards.Get().Position(card.Index)), Unlimitable: a.unlimitable, Runtime: i.runtime,
		Compute:    isolation.Compute{Major: a.compute.Major, Minor: a.compute.Minor, Mode: a.compute.Mode.String()},
		Unreadable: a.unreadable,
	}
}

// CheckInForce returns why a limit of this mode on the card of this index may not be in force; nil if it is, or if that isn't known.
func (i *isolator) CheckInForce(mode string, index int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, card := range i.cards.Get().All {
		if card.Index == index {
			return i.backends.Of(isolation.Mode(mode)).CheckInForce(i.card(card))
		}
	}
	return nil
}

// SetShared tells the mode in force which cards the node shares.
func (i *isolator) SetShared(uuids []string) error {
	i.mu.Lock()
	backend := i.backends.Of(i.mode)
	i.mu.Unlock()
	return backend.SetShared(uuids)
}

// containerLimit is what enforces a container's share of each of its cards.
type containerLimit struct {
	isolation.Edits
	// mode and limit are allocation.Allocation's.
	mode  isolation.Mode
	limit uint64
	// allowed is allocation.Allocation.Allowed.
	allowed uint64
}

// Isolate returns what enforces the container's share of the decision's cards, or the decision with a rejection if that fails. The mode in
// force now counts, also if it has changed since the decision: the container gets its environment, its CDI devices and its record from
// this one answer. For the same reason it checks again whether the cards are ready.
func (i *isolator) Isolate(d allocation.Decision, unit gpu.Unit) (allocation.Decision, containerLimit) {
	if d.Rejection != nil {
		return d, containerLimit{}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, card := range d.Cards {
		if err := i.ready(card); err != nil {
			return d.Reject(allocation.RefusedUnavailable, "%v", err), containerLimit{}
		}
	}
	each := d.Container.Share(len(d.Cards))
	share := isolation.Share{Limit: unit.Bytes(each.Memory), Cores: int(each.Cores)}
	l := containerLimit{}
	if allowed := d.Container.Allowed(d.Cards, unit); allowed > share.Limit && !i.mode.Rules().NoLimitAboveRequest {
		share.Limit, l.allowed = allowed, allowed
	}
	if !i.mode.Rules().Limits {
		return d, l
	}
	var shares []isolation.Share
	for _, card := range d.Cards {
		share.Card = i.card(card)
		shares = append(shares, share)
	}
	var err error
	if l.Edits, err = i.backends.Of(i.mode).Apply(shares); err != nil {
		return d.Reject(allocation.RefusedUnavailable, "isolation mode %s: %v", i.mode, err), containerLimit{}
	}
	for _, mount := range l.Mounts {
		if mount.ContainerPath == protocol.SharedMemory && d.Container.SharedMemory {
			return d.Reject(allocation.RefusedInvalid, "isolation mode %s: the container mounts a volume at %s, where it gets a directory of this mode: "+
				"remove the mount", i.mode, mount.ContainerPath), containerLimit{}
		}
	}
	l.mode = i.mode
	l.limit, _ = i.backends.Of(i.mode).LimitOf(l.Edits)
	return d, l
}
