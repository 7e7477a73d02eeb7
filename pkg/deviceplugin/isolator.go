package deviceplugin

import (
	"errors"
	"fmt"
	"slices"
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

// isolator decides in which isolation mode new containers start, and which cards are ready for it. A change of the mode counts for
// new containers only: the kubelet starts a container again with what it was given first.
type isolator struct {
	cards    *cardState
	visible  VisibleDevices
	backends map[isolation.Mode]isolation.Backend
	// cgroups is the hierarchy of cgroups, of which the driver is asked.
	cgroups string

	// mu guards the fields below.
	mu sync.Mutex
	// known is true once the Node object was read. Before that no mode is in force.
	known bool
	node  isolation.Node
	// configured is the mode of a node without the label; mode is the one in force.
	configured, mode isolation.Mode
	// labelled is true if the node has the label, which takes precedence.
	labelled bool
	// invalid is why the node's label names no mode. No new container can start then.
	invalid error
	// unlimitable are the cards that the driver was asked about, with the reason why it can't limit their memory, by UUID.
	unlimitable map[string]error
}

// SetNode reads the node's label and versions.
func (i *isolator) SetNode(node *corev1.Node) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.known, i.mode, i.invalid, i.labelled = true, i.configured, nil, false
	if label, ok := node.Labels[protocol.LabelIsolation]; ok {
		i.labelled = true
		mode, err := isolation.ParseMode(label)
		if i.mode = mode; err != nil {
			i.mode, i.invalid = isolation.None, fmt.Errorf("label %s of the node: %w", protocol.LabelIsolation, err)
		}
	}
	info := node.Status.NodeInfo
	i.node = isolation.Node{KubeletVersion: info.KubeletVersion, Runtime: info.ContainerRuntimeVersion}
	i.check()
}

// Configure sets the mode of a node without the label.
func (i *isolator) Configure(mode isolation.Mode) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.configured = mode
	if !i.labelled {
		i.mode = mode
	}
	i.check()
}

// Ask asks the driver whether it can limit memory of each card.
func (i *isolator) Ask(driver usage.Driver) {
	answers := map[string]error{}
	for _, uuid := range driver.Cards() {
		_, err := driver.Limit(uuid, i.cgroups)
		if errors.Is(err, inventory.ErrUnsupported) {
			err = errors.New("the driver can't limit its memory: R615 or later is needed")
		}
		answers[uuid] = err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.unlimitable = answers
	i.check()
}

// Check decides again which cards are ready, after a change of the cards.
func (i *isolator) Check() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.check()
}

// check brings the cards in line with the mode. The caller holds mu.
func (i *isolator) check() {
	if !i.known {
		return
	}
	notReady := map[int]string{}
	for _, card := range i.cards.Listed() {
		if err := i.ready(card); err != nil {
			notReady[card.Index] = err.Error()
		}
	}
	i.cards.Isolate(i.mode, notReady)
}

// ready returns why no new container may start on a card; nil if one may. The caller holds mu.
func (i *isolator) ready(card gpu.Card) error {
	if i.invalid != nil {
		return i.invalid
	}
	if err := i.backends[i.mode].Ready(i.node, i.card(card)); err != nil {
		return fmt.Errorf("isolation mode %s: %w", i.mode, err)
	}
	return nil
}

// card returns what a backend needs to know. The caller holds mu.
func (i *isolator) card(card gpu.Card) isolation.Card {
	unlimitable, asked := i.unlimitable[card.UUID]
	if !asked {
		unlimitable = errNotAsked
	}
	return isolation.Card{UUID: card.UUID, Device: i.visible.name(card, i.cards.Position(card.Index)), Unlimitable: unlimitable}
}

// limitation is what enforces a container's share of each of its cards.
type limitation struct {
	// devices are CDI devices, and limit is that of each card in bytes; none and 0 if the share isn't enforced.
	devices []string
	limit   uint64
}

// Isolate returns what enforces the container's share of the decision's cards, or the decision with a rejection if that fails.
func (i *isolator) Isolate(d allocation.Decision, unit gpu.Unit) (allocation.Decision, limitation) {
	if d.Rejection != nil {
		return d, limitation{}
	}
	l, err := i.limit(d.Cards, unit.Bytes(d.Container.Request/gpu.Memory(len(d.Cards))))
	if err != nil {
		d.Result = allocation.RefusedUnavailable
		d.Rejection = &allocation.Rejection{Result: d.Result, Text: err.Error()}
	}
	return d, l
}

// limit returns what enforces a share in bytes of each of the cards. It checks again whether they are ready, because the decision's
// cards can be older than the mode and the node's files.
func (i *isolator) limit(cards []gpu.Card, share uint64) (l limitation, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(cards) > 1 && !i.mode.SeveralCards() {
		return limitation{}, fmt.Errorf("isolation mode %s: a container can have one card only, the pod has %d", i.mode, len(cards))
	}
	for _, card := range cards {
		if err := i.ready(card); err != nil {
			return limitation{}, err
		}
		if !i.mode.Limits() {
			continue
		}
		devices, err := i.backends[i.mode].Apply(i.card(card), share)
		if err != nil {
			return limitation{}, fmt.Errorf("isolation mode %s: %w", i.mode, err)
		}
		for _, device := range devices {
			if !slices.Contains(l.devices, device) { // The device of the limit is the same for each card.
				l.devices = append(l.devices, device)
			}
		}
		l.limit = share
	}
	return l, nil
}
