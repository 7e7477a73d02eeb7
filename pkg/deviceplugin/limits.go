package deviceplugin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// limitWatch compares the limits that containers were given with those that the driver has. NVIDIA's hook lets a container start
// without its limit if it can't read the container's configuration, and a runtime that ignores CDI devices runs no hook at all.
type limitWatch struct {
	pods    *podSource
	record  *allocation.Record
	events  events.EventRecorder
	metrics *metrics
	// backends keep what containers need to start again with their limits.
	backends *isolation.Backends
	// checkInForce returns why a limit of this mode on the card of this index may not be in force; nil if it is.
	checkInForce func(mode string, card int) error
	// annotate is called for each pod whose annotation may have to change.
	annotate func(gpu.PodUID)

	// mu guards the fields below.
	mu sync.Mutex
	// found is what the last report says about each pod with a limit.
	found map[gpu.PodUID]protocol.PodIsolation
	// notRead are the containers whose limit could not be read in the last report.
	notRead map[allocation.ContainerKey]bool
}

// Isolation returns what is known about the limits of a pod; ok is false if nothing is.
func (w *limitWatch) Isolation(uid gpu.PodUID) (state protocol.PodIsolation, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	state, ok = w.found[uid]
	return state, ok
}

// Keep makes sure that the containers of the record can be started again with their limits, and reports whether that fails. The log has only the
// first of several failures, which failing tells apart.
func (w *limitWatch) Keep(ctx context.Context, failing bool) bool {
	var limits []uint64
	for _, containers := range w.record.Snapshot() {
		for _, given := range containers {
			for _, limit := range []uint64{given.Limit, given.NextLimit} {
				if limit > 0 {
					limits = append(limits, limit)
				}
			}
		}
	}
	err := w.backends.KeepLimits(limits)
	if err != nil && !failing {
		klog.FromContext(ctx).Error(err, "Could not keep the CDI specification of limits up to date, trying again")
	}
	return err != nil
}

// Update reports the limits that are not in force. The cgroup of a container that has ended is gone before the API server shows that,
// so a limit that can't be read counts only the second time, and not for a pod that is being deleted: the kubelet reports the end of
// such a pod's containers when all have ended.
func (w *limitWatch) Update(report protocol.Usage) {
	w.mu.Lock()
	before := w.found
	found, notRead, failed := map[gpu.PodUID]protocol.PodIsolation{}, map[allocation.ContainerKey]bool{}, 0
	limited := 0
	unlimited := map[gpu.PodUID]string{}
	for _, row := range report.Containers {
		uid, key := gpu.PodUID(row.UID), allocation.ContainerKey{UID: gpu.PodUID(row.UID), Name: row.Container}
		mode := w.record.Pod(uid)[row.Container].Mode
		if row.Given == nil && row.Requested > 0 && mode == "" {
			unlimited[uid] = row.Container
		}
		if row.Given == nil || mode == "" { // The record can have lost the container since the measurement.
			continue
		}
		pod, _ := w.pods.ByUID(uid)
		if row.NotRead && (pod.Leaving || !w.notRead[key]) {
			notRead[key] = true
			if last, ok := before[uid]; ok && found[uid].Mode == "" {
				found[uid] = last
			}
			continue
		}
		limited++
		state := protocol.PodIsolation{Mode: mode, Problem: found[uid].Problem}
		if row.NotInForce != "" {
			failed++
			notRead[key] = row.NotRead
			state.Problem = "container " + row.Container + w.cardOf(uid, row) + ": " + row.NotInForce
		}
		found[uid] = state
	}
	w.addNotReadBack(found)
	for uid, container := range unlimited {
		if state, limited := found[uid]; limited && state.Problem == "" {
			state.Problem = "container " + container + ": it was started without a limit"
			found[uid] = state
		}
	}
	w.found, w.notRead = found, notRead
	w.mu.Unlock()
	w.metrics.limits.WithLabelValues("in_force").Set(float64(limited - failed))
	w.metrics.limits.WithLabelValues("not_in_force").Set(float64(failed))
	w.report(before, found)
}

// cardOf names the card of a row if the pod has several.
func (w *limitWatch) cardOf(uid gpu.PodUID, row protocol.ContainerUsage) string {
	if pod, ok := w.pods.ByUID(uid); !ok || pod.NumCards() < 2 {
		return ""
	}
	return fmt.Sprintf(", card %d", row.Card)
}

// addNotReadBack adds the pods of which containers were given a limit that can't be read back. Of an init container that doesn't run, no limit has
// to be in force.
func (w *limitWatch) addNotReadBack(found map[gpu.PodUID]protocol.PodIsolation) {
	for uid, containers := range w.record.Snapshot() {
		pod, _ := w.pods.ByUID(uid)
		for _, name := range slices.Sorted(maps.Keys(containers)) {
			given := containers[name]
			state, has := found[uid]
			if given.Mode == "" || given.Limit > 0 || has && state.Problem != "" {
				continue
			}
			if !has {
				state.Mode = given.Mode
			}
			init := slices.ContainsFunc(pod.Containers, func(c allocation.Container) bool { return c.Name == name && c.Init })
			ended := init && w.pods.Instance(allocation.ContainerKey{UID: uid, Name: name}) == ""
			for _, share := range given.Cards {
				if err := w.checkInForce(given.Mode, share.Card); err != nil && !ended {
					state.Problem = "container " + name + ": " + err.Error()
				}
			}
			found[uid] = state
		}
	}
}

// report sends an Event for each pod with a new problem, and has the annotations of changed pods written.
func (w *limitWatch) report(before, now map[gpu.PodUID]protocol.PodIsolation) {
	for uid, state := range now {
		if state == before[uid] {
			continue
		}
		if pod, ok := w.pods.ByUID(uid); ok && state.Problem != "" && pod.Isolation != state.String() {
			w.events.Event(podReference(&pod), corev1.EventTypeWarning, eventLimitNotInForce, state.Problem)
		}
		w.annotate(uid)
	}
}
