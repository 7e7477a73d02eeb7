package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// nodeKeeper writes the node's cards to the Node object: the inventory annotation, and the amounts in the status that no device
// plugin can report (amounts). The kubelet leaves both unchanged, unless it creates the Node again or starts
// without a checkpoint. The keeper therefore watches the Node.
type nodeKeeper struct {
	client   Client
	name     string
	cards    *cardState
	events   events.EventRecorder
	informer cache.SharedIndexInformer
	wake     background.Signal
	// written is closed once the inventory is on the Node.
	written chan struct{}
	// wholeCards lists, as text, by what else the Node offered its cards at the last check. Only Run uses it.
	wholeCards string
	isolator   *isolator
	slices     cache.SharedIndexInformer
	// last is the annotation that was written last. repeats limits how often it is written again, and contested how often another writer is
	// reported. Only Run uses them.
	last      string
	repeats   *rate.Limiter
	contested rate.Sometimes
}

// nodeRecheck is the interval at which the Node is checked even if no change was reported.
const nodeRecheck = 30 * time.Second

// manyRepeats is how often the inventory can be written again at once. More are likely due to something else than a delay of the watch.
const manyRepeats = 5

func newNodeKeeper(
	client Client, name string, cards *cardState, recorder events.EventRecorder, isolator *isolator,
) (*nodeKeeper, error) {
	informer, err := newInformer(client.Nodes, &corev1.Node{}, fields.OneTermEqualSelector(metav1.ObjectNameField, name), nil, nil)
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of the node: %w", err)
	}
	k := &nodeKeeper{
		client: client, name: name, cards: cards, events: recorder, isolator: isolator, informer: informer,
		wake: background.NewSignal(), written: make(chan struct{}),
		repeats: rate.NewLimiter(rate.Every(nodeRecheck), manyRepeats), contested: rate.Sometimes{Interval: time.Hour},
	}
	_, err = k.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { k.wake.Raise() },
		UpdateFunc: func(any, any) { k.wake.Raise() },
	})
	if err != nil {
		return nil, fmt.Errorf("following the node: %w", err)
	}
	if k.slices, err = newSliceInformer(client.Slices, name, k.wake.Raise); err != nil {
		return nil, err
	}
	return k, nil
}

// DisableIsolation reports whether the node carries the label that switches cGPU's isolation off.
func (k *nodeKeeper) DisableIsolation() bool {
	node, err := k.node()
	return err == nil && node.Labels[protocol.LabelDisableIsolation] == "true"
}

// Written reports whether the inventory is on the Node.
func (k *nodeKeeper) Written() bool {
	select {
	case <-k.written:
		return true
	default:
		return false
	}
}

// Inventory returns the inventory on the Node. It returns the zero value if the Node has no readable one.
func (k *nodeKeeper) Inventory() protocol.Inventory {
	node, err := k.node()
	if err != nil {
		return protocol.Inventory{}
	}
	inventory, err := protocol.ParseInventory(node.Annotations)
	if err != nil {
		return protocol.Inventory{}
	}
	return inventory
}

// unitOf returns the unit of a node's inventory; zero if there is none, or if the capacity shows that the original gpushare plugin,
// which counts in GiB or MiB, has run since. Any other difference is a capacity that lags behind the inventory.
func unitOf(node *corev1.Node) gpu.Unit {
	parsed := protocol.ParseNode(node)
	if parsed.Problem == nil {
		return parsed.Unit
	}
	capacity := node.Status.Capacity[protocol.ResourceMemory]
	for _, other := range []gpu.Unit{gpu.GiB, gpu.MiB} {
		var sum gpu.Memory
		for _, card := range parsed.Cards {
			sum = sum.Add(other.Count(parsed.Unit.Bytes(card.Memory)))
		}
		rounding := int64(len(parsed.Cards))
		if difference := capacity.Value() - int64(sum); other != parsed.Unit && -rounding <= difference && difference <= rounding {
			return 0
		}
	}
	return parsed.Unit
}

// node returns the Node as the informer knows it.
func (k *nodeKeeper) node() (*corev1.Node, error) {
	object, _, err := k.informer.GetStore().GetByKey(k.name)
	if node, ok := object.(*corev1.Node); ok {
		return node, nil
	}
	return nil, errors.Join(fmt.Errorf("the API server has no node %s", k.name), err)
}

// Run keeps the Node up to date until ctx ends.
func (k *nodeKeeper) Run(ctx context.Context) error {
	backoff := newBackoff()
	for {
		changed := k.cards.Get().Changed
		delay, err := k.keep(ctx)
		if err != nil && ctx.Err() == nil {
			delay = backoff.Step()
			klog.FromContext(ctx).Error(err, "Could not update the node, trying again", "node", k.name, "delay", delay)
		} else {
			backoff = newBackoff()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		case <-changed:
		case <-time.After(delay):
		}
	}
}

// newBackoff returns the backoff for retries without a limit.
func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 10, Cap: 30 * time.Second}
}

// keep makes the write that the Node needs, if it may be made now. Usually it needs none. It returns after how long to call keep again.
func (k *nodeKeeper) keep(ctx context.Context) (time.Duration, error) {
	node, err := k.node()
	if err != nil {
		return 0, err
	}
	k.isolator.SetNode(node)
	if k.cards.Get().Problem != nil {
		return nodeRecheck, nil // No inventory is written for cards that aren't offered.
	}
	inventory, former := k.cards.Inventory(), k.Inventory()
	keepHealthy(&inventory, former)
	inventory.DRADriver = k.draDriver(former.DRADriver)
	k.warnOfWholeCards(ctx, node, inventory.DRADriver)
	annotation, err := inventory.Annotation()
	if err != nil {
		return 0, err
	}
	amounts := amounts(inventory.Cards)
	if node.Annotations[protocol.AnnotationInventory] != annotation || !has(node.Status.Capacity, amounts) || !has(node.Status.Allocatable, amounts) {
		if pause := k.pause(ctx, annotation); pause > 0 {
			return pause, nil
		}
		if err := patchCards(ctx, k.client, k.name, annotation, amounts); err != nil {
			return 0, fmt.Errorf("writing the inventory and %s of node %s: %w", protocol.ResourceCount, k.name, err)
		}
		k.last = annotation
	}
	if !k.Written() {
		close(k.written)
	}
	return nodeRecheck, nil
}

// pause returns how long to wait before the annotation may be written. A new one needs no wait. One that was written before was undone: two
// plugins with different configurations see each other's writes at once, and would write without end.
func (k *nodeKeeper) pause(ctx context.Context, annotation string) time.Duration {
	if annotation != k.last {
		return 0
	}
	repeat := k.repeats.Reserve()
	pause := repeat.Delay()
	if pause > 0 {
		repeat.Cancel()
		k.contested.Do(func() {
			klog.FromContext(ctx).Error(nil, "Another program changes the inventory or the amounts of this node again and again", "node", k.name)
			k.events.Eventf(nodeReference(k.name), corev1.EventTypeWarning, eventContested,
				"another program changes the inventory or the amounts of this node again and again. Probably a second gpushare device plugin runs "+
					"here, with another configuration: look for it with kubectl get pods -A --field-selector spec.nodeName=%s", k.name)
		})
	}
	return pause
}

// keepHealthy lists cards as healthy of which the kubelet doesn't have the devices yet, if they were in the former inventory: a
// plugin that restarts doesn't end reservations on its node. After a start of the machine, they count as new.
func keepHealthy(inventory *protocol.Inventory, former protocol.Inventory) {
	if former.BootID != inventory.BootID || former.Unit != inventory.Unit {
		return
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		if card.Unhealthy == reasonNotSent && slices.ContainsFunc(former.Cards, func(c gpu.Card) bool {
			return c.UUID == card.UUID && c.Index == card.Index && c.Healthy() && c.Memory >= card.Memory
		}) {
			card.Unhealthy = ""
		}
	}
}

// amounts are what the node's status has beside the memory, by resource: the number of cards and their cores. Unhealthy cards count
// too: pods may run on them, and a kubelet that restarts admits them again by these amounts (k8s.io/kubernetes
// pkg/kubelet/lifecycle/predicate.go). The extender decides by card.
func amounts(cards []gpu.Card) map[corev1.ResourceName]*resource.Quantity {
	n := int64(len(cards))
	return map[corev1.ResourceName]*resource.Quantity{
		protocol.ResourceCount: resource.NewQuantity(n, resource.DecimalSI),
		protocol.ResourceCores: resource.NewQuantity(n*int64(gpu.CardCores), resource.DecimalSI),
	}
}

// has reports whether the list has the amounts. The API server writes some of them in another form, such as 1k for 1000.
func has(list corev1.ResourceList, amounts map[corev1.ResourceName]*resource.Quantity) bool {
	for name, amount := range amounts {
		if q, ok := list[name]; !ok || !q.Equal(*amount) {
			return false
		}
	}
	return true
}

// patchCards sets the inventory and the amounts of a node; nil removes them. All are in one write, because a
// reader ignores an inventory if its number of cards differs from gpu-count and their sum from gpu-mem, which can lag behind
// (protocol.ParseNode). A patch of a node's status changes annotations too (k8s.io/kubernetes
// pkg/registry/core/node/strategy.go, nodeStatusStrategy).
func patchCards(ctx context.Context, client Client, node string, inventory any, amounts map[corev1.ResourceName]*resource.Quantity) error {
	data, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{protocol.AnnotationInventory: inventory}},
		"status":   map[string]any{"capacity": amounts, "allocatable": amounts},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	_, err = client.Nodes.Patch(ctx, node, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	return err
}

// Cleanup removes from a Node object what only the plugin writes there: the inventory and the amounts beside the memory. A plugin that
// still runs on the node writes both again.
func Cleanup(ctx context.Context, client Client, node string) error {
	amounts := map[corev1.ResourceName]*resource.Quantity{protocol.ResourceCount: nil, protocol.ResourceCores: nil}
	if err := patchCards(ctx, client, node, nil, amounts); err != nil {
		return fmt.Errorf("removing %s and the inventory from node %s: %w", protocol.ResourceCount, node, err)
	}
	return nil
}

// warnOfWholeCards warns once if the node offers its cards both as shared memory and by NVIDIA's device plugin or DRA driver.
func (k *nodeKeeper) warnOfWholeCards(ctx context.Context, node *corev1.Node, driver string) {
	resources := protocol.WholeCardResources(node.Status.Capacity)
	if driver != "" {
		resources = append(resources, "ResourceSlices of "+driver)
	}
	offers := strings.Join(resources, ", ")
	if offers != "" && offers != k.wholeCards {
		klog.FromContext(ctx).Info("The node also offers its cards by NVIDIA's device plugin or DRA driver, so no pod is scheduled to share them: "+
			"remove one of the two", "node", k.name, "offers", offers)
		k.events.Eventf(nodeReference(k.name), corev1.EventTypeWarning, eventSharedTwice,
			"the node offers %s and %s at once, which exclude each other", offers, protocol.ResourceMemory)
	}
	k.wholeCards = offers
}
