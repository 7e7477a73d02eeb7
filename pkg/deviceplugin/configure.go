package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// configurator keeps the node's configuration in force: it reads the file that the node's label selects, and again when the
// label, the file or the node's pods change. A configuration that can't be used changes nothing; at the start the node then
// offers nothing. Running containers are never affected.
type configurator struct {
	source nodeconfig.Source
	node   *nodeKeeper
	pods   *podSource
	cards  *cardState
	// isolator takes the isolation mode.
	isolator *isolator
	// held returns the memory that pods hold on each card.
	held    func() map[int]gpu.Memory
	metrics *metrics
	events  events.EventRecorder
	object  *corev1.ObjectReference
	wake    background.Signal

	// inForce are the settings in force; nil until the first are known. decided is closed then.
	inForce atomic.Pointer[nodeconfig.Settings]
	decided chan struct{}

	// selected is the configuration of which inForce are the settings. Only Apply uses it, and it runs once at a time.
	selected nodeconfig.Selected
	// vain are the entries of excludedCards that match no card, as text. Only Apply uses it too.
	vain string
	// problem is why the selected configuration isn't in force, or not completely; nil if it is.
	problem atomic.Pointer[string]
}

// Watch registers the event handlers for what decides about the configuration.
func (c *configurator) Watch() error {
	handlers := cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { c.wake.Raise() }, UpdateFunc: func(any, any) { c.wake.Raise() }, DeleteFunc: func(any) { c.wake.Raise() },
	}
	for _, informer := range []cache.SharedIndexInformer{c.node.informer, c.pods.informer} {
		if _, err := informer.AddEventHandler(handlers); err != nil {
			return fmt.Errorf("watching for changes of the configuration: %w", err)
		}
	}
	return nil
}

// Run keeps the configuration up to date until ctx ends.
func (c *configurator) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.wake:
		case <-time.After(recheckInterval):
		}
		c.Apply(ctx)
	}
}

// recheckInterval is the time between two looks at files that others change.
const recheckInterval = 5 * time.Second

// Missing returns why no configuration is in force; empty if one is.
func (c *configurator) Missing() string {
	if problem := c.problem.Load(); problem != nil && c.inForce.Load() == nil {
		return *problem
	}
	return ""
}

// Apply reads the configuration, brings into force what can be, and reports changes. Only one call may run at a time.
func (c *configurator) Apply(ctx context.Context) {
	node, err := c.node.node()
	if err != nil {
		return // The Node is being created, for the first time or again, and its add event follows.
	}
	if selected, err := c.source.Read(node.Labels[protocol.LabelConfig]); err != nil {
		c.reject(ctx, err)
	} else {
		c.apply(ctx, node, selected)
	}
	c.release()
}

// apply brings into force what can be of the selected configuration.
func (c *configurator) apply(ctx context.Context, node *corev1.Node, selected nodeconfig.Selected) {
	before := c.inForce.Load()
	current := before
	if before == nil { // Pods may hold memory that an earlier plugin has counted in another unit.
		first := selected.Settings
		first.Unit = cmp.Or(unitOf(node), first.Unit)
		current = &first
	}
	next, waits := selected.Settings.ApplicableNow(*current, c.hasPods())
	if before == nil || !next.Equal(*before) {
		c.cards.Exclude(next.Excluded)
		c.isolator.Configure(next.Isolation)
		c.inForce.Store(&next)
		if before == nil {
			close(c.decided)
		}
	}
	c.reportChange(ctx, selected, next.Changes(*current), before == nil && c.problem.Load() == nil)
	problem := notice{reason: eventConfigWaits, text: waits}
	if ignored := c.source.Ignored(node.Labels[protocol.LabelConfig]); waits == "" && ignored != "" {
		problem = notice{reason: eventConfigRejected, text: ignored}
	}
	c.reportProblem(ctx, problem)
	c.reportVain(ctx)
}

// reportVain reports entries of excludedCards that have come to match no card, such as a misspelt model.
func (c *configurator) reportVain(ctx context.Context) {
	before := c.vain
	c.vain = strings.Join(c.cards.ExcludedInVain(), ", ")
	if c.vain == "" || c.vain == before {
		return
	}
	klog.FromContext(ctx).Info("Entries of excludedCards match no card", "entries", c.vain)
	c.events.Event(c.object, corev1.EventTypeNormal, eventConfigChanged, "these entries of excludedCards match no card: "+c.vain)
}

// hasPods reports whether live pods on the node ask for GPU memory.
func (c *configurator) hasPods() bool {
	return slices.ContainsFunc(c.pods.Cached(), func(p allocation.Pod) bool { return !p.Ended })
}

// release stops reporting the excluded cards that no pod uses any more.
func (c *configurator) release() {
	if c.cards.Excludes() {
		c.cards.SetHeld(c.held())
	}
}

// reject keeps the configuration in force, because the selected one can't be used.
func (c *configurator) reject(ctx context.Context, err error) {
	keeps := "the node offers no GPU memory until it is corrected"
	if c.inForce.Load() != nil {
		keeps = "the earlier one stays in force"
	}
	text := fmt.Sprintf("the configuration can't be used, %s: %s", keeps, strings.ReplaceAll(err.Error(), "\n", "; "))
	c.reportProblem(ctx, notice{reason: eventConfigRejected, text: text})
}

// reportProblem reports a problem once. A notice without a text ends it.
func (c *configurator) reportProblem(ctx context.Context, n notice) {
	if before := c.problem.Swap(&n.text); before == nil && n.text == "" || before != nil && *before == n.text {
		return
	}
	c.metrics.configOutdated.Set(oneIf(n.text != ""))
	if n.text == "" {
		return
	}
	klog.FromContext(ctx).Error(nil, "The node's configuration is not in force", "reason", n.text)
	c.events.Event(c.object, corev1.EventTypeWarning, n.reason, n.text)
}

// reportChange reports the configuration in force if it has changed. changes are the keys that took effect. At the start, which
// first marks, the log is enough.
func (c *configurator) reportChange(ctx context.Context, selected nodeconfig.Selected, changes []string, first bool) {
	before := c.selected
	if !first && selected.Name == before.Name && selected.Hash == before.Hash && len(changes) == 0 {
		return
	}
	c.selected = selected
	c.metrics.setConfig(selected.Name, selected.Hash)
	s := c.inForce.Load()
	klog.FromContext(ctx).Info("Configuration in force", "config", selected.Name, "hash", selected.Hash, "changed", changes,
		"unit", s.Unit.String(), "excludedCards", s.Excluded, "isolation", s.Isolation, "healthQuietPeriod", s.QuietPeriod)
	if !first && (len(changes) > 0 || selected.Name != before.Name) {
		text := fmt.Sprintf("configuration %s is in force", selected.Name)
		if len(changes) > 0 {
			text += "; changed: " + strings.Join(changes, ", ")
		}
		c.events.Event(c.object, corev1.EventTypeNormal, eventConfigChanged, text)
	}
}
