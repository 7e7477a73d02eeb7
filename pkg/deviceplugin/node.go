package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// nodeKeeper makes the node object say what cards the node has: the inventory annotation, and the number of cards in
// its status, which no device plugin can report. The kubelet leaves both as they are, except where it makes the node
// anew or starts without a checkpoint; so the node is watched.
type nodeKeeper struct {
	client   Client
	name     string
	cards    *cardState
	events   events.EventRecorder
	informer cache.SharedIndexInformer
	wake     chan struct{}
	// written is closed when the inventory stands on the node for the first time.
	written chan struct{}
	// wholeCards are NVIDIA's resources that the node was last seen offering, as text. Only Run uses it.
	wholeCards       string
	disableIsolation atomic.Bool
}

// nodeRecheck is how often the node is looked at though nothing seems to have changed.
const nodeRecheck = 30 * time.Second

func newNodeKeeper(client Client, name string, cards *cardState, recorder events.EventRecorder) (*nodeKeeper, error) {
	informer, err := newInformer(client.Nodes, &corev1.Node{}, fields.OneTermEqualSelector(metav1.ObjectNameField, name),
		client.PlainLists, slimNode, nil)
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of the node: %w", err)
	}
	k := &nodeKeeper{
		client: client, name: name, cards: cards, events: recorder, informer: informer,
		wake: make(chan struct{}, 1), written: make(chan struct{}),
	}
	_, err = k.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { poke(k.wake) },
		UpdateFunc: func(any, any) { poke(k.wake) },
	})
	if err != nil {
		return nil, fmt.Errorf("following the node: %w", err)
	}
	return k, nil
}

// poke wakes whoever waits for the channel, once.
func poke(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// DisableIsolation says whether the node carries the label that switches cGPU's isolation off.
func (k *nodeKeeper) DisableIsolation() bool { return k.disableIsolation.Load() }

// Written says whether the inventory has been written.
func (k *nodeKeeper) Written() bool {
	select {
	case <-k.written:
		return true
	default:
		return false
	}
}

// Told returns the cards of the inventory that stands on the node, counted in the plugin's unit, and the boot in which it
// was written; none where there is no inventory that can be read.
func (k *nodeKeeper) Told() (cards []gpu.Card, bootID string) {
	object, _, err := k.informer.GetStore().GetByKey(k.name)
	node, ok := object.(*corev1.Node)
	if err != nil || !ok {
		return nil, ""
	}
	inventory, err := protocol.ParseInventory(node.Annotations)
	if err != nil {
		return nil, ""
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		card.Memory = k.cards.unit.Count(inventory.Unit.Bytes(card.Memory))
	}
	return inventory.Cards, inventory.BootID
}

// Run keeps the node until the context ends.
func (k *nodeKeeper) Run(ctx context.Context) error {
	backoff := newBackoff()
	for {
		_, changed, _ := k.cards.Get()
		delay := nodeRecheck
		if err := k.keep(ctx); err != nil && ctx.Err() == nil {
			delay = backoff.Step()
			klog.FromContext(ctx).Info("The node can't be brought up to date now: trying again",
				"node", k.name, "after", delay, "reason", err.Error())
		} else {
			backoff = newBackoff()
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-k.wake:
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// newBackoff is for what is tried again without end: quickly at first, twice a minute at last.
func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 10, Cap: 30 * time.Second}
}

// keep makes the writes that the node needs, none as a rule.
func (k *nodeKeeper) keep(ctx context.Context) error {
	if _, _, problem := k.cards.Get(); problem != nil {
		return nil // Nothing to say about cards that aren't offered.
	}
	object, ok, err := k.informer.GetStore().GetByKey(k.name)
	if err != nil {
		return fmt.Errorf("looking for node %s: %w", k.name, err)
	}
	node, isNode := object.(*corev1.Node)
	if !ok || !isNode {
		return fmt.Errorf("node %s isn't known to the API server yet", k.name)
	}
	k.disableIsolation.Store(node.Labels[protocol.LabelDisableIsolation] == "true")
	k.warnOfWholeCards(ctx, node)

	inventory := k.cards.Inventory()
	annotation, err := inventory.Annotation()
	if err != nil {
		return err
	}
	count := strconv.Itoa(len(inventory.Cards))
	if node.Annotations[protocol.AnnotationInventory] != annotation || quantity(node.Status.Capacity) != count || quantity(node.Status.Allocatable) != count {
		if err := patchCards(ctx, k.client, k.name, annotation, count); err != nil {
			return fmt.Errorf("writing the inventory and %s of node %s: %w", protocol.ResourceCount, k.name, err)
		}
	}
	if !k.Written() {
		close(k.written)
	}
	return nil
}

func quantity(list corev1.ResourceList) string {
	q, ok := list[protocol.ResourceCount]
	if !ok {
		return ""
	}
	return q.String()
}

// patchCards sets a node's inventory and number of cards, or removes them where they are nil. It is one write: a reader
// that finds an inventory beside the number of another one takes the node for one of the existing plugin
// (protocol.ParseNode). A patch of a node's status changes annotations too (k8s.io/kubernetes pkg/registry/core/node/strategy.go,
// nodeStatusStrategy).
func patchCards(ctx context.Context, client Client, node string, inventory, count any) error {
	amount := map[string]any{string(protocol.ResourceCount): count}
	data, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{protocol.AnnotationInventory: inventory}},
		"status":   map[string]any{"capacity": amount, "allocatable": amount},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	_, err = client.Nodes.Patch(ctx, node, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	return err
}

// warnOfWholeCards tells once that the node gives its cards out in two ways at once.
func (k *nodeKeeper) warnOfWholeCards(ctx context.Context, node *corev1.Node) {
	offers := strings.Join(protocol.WholeCardResources(node.Status.Capacity), ", ")
	if offers != "" && offers != k.wholeCards {
		klog.FromContext(ctx).Info("The node offers NVIDIA's resources too, so nothing will be scheduled to share its cards: remove one of the two device plugins",
			"node", k.name, "resource", offers)
		k.events.Eventf(nodeReference(k.name), corev1.EventTypeWarning, eventSharedTwice,
			"the node offers %s and %s at once, which exclude each other", offers, protocol.ResourceMemory)
	}
	k.wholeCards = offers
}

// slimNode is the informer's transform.
func slimNode(object any) (any, error) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	out := &corev1.Node{}
	out.Name, out.UID, out.ResourceVersion = node.Name, node.UID, node.ResourceVersion
	if value, ok := node.Annotations[protocol.AnnotationInventory]; ok {
		metav1.SetMetaDataAnnotation(&out.ObjectMeta, protocol.AnnotationInventory, value)
	}
	if value, ok := node.Labels[protocol.LabelDisableIsolation]; ok {
		metav1.SetMetaDataLabel(&out.ObjectMeta, protocol.LabelDisableIsolation, value)
	}
	out.Status.Capacity, out.Status.Allocatable = slimResources(node.Status.Capacity), slimResources(node.Status.Allocatable)
	return out, nil
}

func slimResources(list corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range list {
		if name == protocol.ResourceCount || protocol.IsWholeCard(name) {
			out[name] = amount
		}
	}
	return out
}
