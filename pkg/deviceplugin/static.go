package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// The kubelet serves a static pod before there is an object for it: neither its name nor the rest of what it asks for
// can be known. What is known is whom the kubelet served last, and it admits one pod at a time; and that an edited
// static pod, which to the kubelet is another one, starts only when the one before it has ended
// (k8s.io/kubernetes pkg/kubelet/pod_workers.go, allowStaticPodStart), though it is admitted at once.

// staticRest is the refusal of a container that doesn't fit on the card of the static pod served last. If it belongs to
// that pod, there is no card for it; if it is another static pod's, there may be.
type staticRest struct {
	*refusal
	uid gpu.PodUID
}

func (r *staticRest) Unwrap() error { return r.refusal }

// Static decides which card a container of a pod is given that has no object. Containers of one pod get one card, which
// therefore is, for the first of them, the one with the most room: more may follow. released are pods that hold nothing
// any more by the time that this one runs, if need be.
func (s *snapshot) Static(request gpu.Memory, released map[gpu.PodUID]bool) (gpu.Card, error) {
	card, err := s.static(request)
	if err != nil && len(released) > 0 {
		if then, late := s.without(released).static(request); late == nil {
			return then, nil
		}
	}
	return card, err
}

func (s *snapshot) static(request gpu.Memory) (gpu.Card, error) {
	if uid, index, ok := s.lastStatic(); ok {
		card, known := s.card(index)
		if known && card.Healthy() && s.fits(card, "", request, true) {
			return card, nil
		}
		return gpu.Card{}, &staticRest{&refusal{refusedFull, codes.ResourceExhausted,
			fmt.Sprintf("static pod %s has card %d for other containers, and there is no room there for %s more", uid, index, request)}, uid}
	}
	return s.place(placement.Spread, "", request)
}

// staticFor is how long after one container of a pod the kubelet may ask for the next: at once, but for what we take.
const staticFor = time.Minute

// lastStatic returns the pod without an object which was served last of all, if it is one and that was just now. A
// refusal since then was not for that pod, else the kubelet would have turned it away; so it had all that it asks for.
func (s *snapshot) lastStatic() (uid gpu.PodUID, card int, ok bool) {
	known := map[gpu.PodUID]bool{}
	for i := range s.Pods {
		known[s.Pods[i].UID] = true
	}
	var last serving
	for _, served := range slices.Sorted(maps.Keys(s.Served)) {
		for _, serving := range s.Served[served] {
			// Of those that a starting plugin has found in the books the one without an object is the last.
			latest := serving.At.After(last.At) || serving.At.Equal(last.At) && !known[served]
			if latest && !serving.Lost {
				last, uid, ok = serving, served, !known[served]
			}
		}
	}
	for _, serving := range s.Nameless {
		if serving.At.After(last.At) {
			last, uid, ok = serving, "", true
		}
	}
	return uid, last.Card, ok && last.HasCard() && last.At.After(s.LastRefusal) && s.Now.Sub(last.At) < staticFor
}

// without returns the same without these pods.
func (s *snapshot) without(gone map[gpu.PodUID]bool) *snapshot {
	out := *s
	out.Pods, out.Served = nil, served{}
	for i := range s.Pods {
		if !gone[s.Pods[i].UID] {
			out.Pods = append(out.Pods, s.Pods[i])
		}
	}
	for uid, containers := range s.Served {
		if !gone[uid] {
			out.Served[uid] = containers
		}
	}
	return &out
}

// Released returns the pods without an object of their own whose devices the kubelet has taken back: it has no such pod
// any more, or has turned it away. Their containers may still run: a static pod that is taken away or edited is gone
// from the kubelet's books before its grace period. available are the devices that it has to give now; among them are
// those to be included, which an init container had and its pod's next container is to have again.
func (s *snapshot) Released(available, include []string) map[gpu.PodUID]bool {
	objects := map[gpu.PodUID]bool{}
	for i := range s.Pods {
		if !s.Pods[i].Mirror() {
			objects[s.Pods[i].UID] = true
		}
	}
	offered := map[string]bool{}
	for uid, containers := range s.Served {
		for _, serving := range containers {
			if !objects[uid] && !serving.Lost {
				offered[serving.Sample] = false
			}
		}
	}
	if len(offered) > 0 {
		for _, id := range available {
			if _, asked := offered[id]; asked {
				offered[id] = true
			}
		}
		for _, id := range include {
			delete(offered, id)
		}
	}
	out := map[gpu.PodUID]bool{}
	for uid, containers := range s.Served {
		if objects[uid] {
			continue
		}
		all := true
		for _, serving := range containers {
			all = all && (serving.Freed || !serving.Lost && offered[serving.Sample])
		}
		if all {
			out[uid] = true
		}
	}
	return out
}

// collect forgets the static pods that are over, which the kubelet's checkpoint shows only once it has been written
// anew. Two things together tell: the kubelet offers their devices, so it won't start them any more; and the API server,
// asked after that, has no mirror of theirs, which the kubelet deletes when their containers have ended
// (k8s.io/kubernetes pkg/kubelet/kubelet_pods.go, HandlePodCleanups). It is called with the turn.
func (a *allocator) collect(ctx context.Context, available, include []string) {
	given, nameless := a.record.Snapshot()
	if len(nameless) > 0 {
		a.Sync(ctx)
		given, _ = a.record.Snapshot()
	}
	maps.DeleteFunc(given, func(uid gpu.PodUID, _ servings) bool { return a.pods.Exists(uid) })
	over := (&snapshot{Served: given}).Released(available, include)
	if len(over) == 0 {
		return
	}
	logger := klog.FromContext(ctx)
	pods, err := a.pods.Live(ctx)
	if err != nil {
		logger.Info("Static pods that the kubelet has let go of keep their memory: it can't be told whether they still run", "reason", err.Error())
		return
	}
	for i := range pods {
		delete(over, pods[i].UID)
	}
	for uid := range over {
		a.record.Forget(uid)
		logger.Info("A pod that has no object is over", "uid", uid)
	}
}

// edited leaves, of static pods that the kubelet has taken the devices back from, those that it knows another one in the
// place of: that one isn't started before they have ended. One that was taken away goes through its grace period beside
// whatever is started. A kubelet that can't be asked is taken to mean the former.
func (a *allocator) edited(ctx context.Context, s *snapshot, released map[gpu.PodUID]bool) map[gpu.PodUID]bool {
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for i := range s.Pods {
		pod := &s.Pods[i]
		if !released[pod.UID] || len(pod.Containers) == 0 {
			continue
		}
		if a.resources.Standing(asking, candidate{Pod: pod, Container: pod.Containers[0]}) == absent && a.resources.Answers() {
			delete(released, pod.UID)
		}
	}
	return released
}

// mirrorPatience bounds the wait for the mirror of a static pod. On a busy machine it takes seconds; in vain it is
// waited for only where a container is refused in the end.
const mirrorPatience = 10 * time.Second

// static decides on the card of a static pod's container. Whether it is another pod than the one before shows in that
// one's mirror: the kubelet makes it once the pod has been admitted, which can't be while one of its containers is. That
// one of a pod which was turned away never comes, but collect has seen that already.
func (a *allocator) static(ctx context.Context, s *snapshot, request gpu.Memory, released map[gpu.PodUID]bool) (gpu.Card, error) {
	card, err := s.Static(request, released)
	rest := (*staticRest)(nil)
	if !errors.As(err, &rest) {
		return card, err
	}
	patience := a.patience
	if a.missed == rest.uid {
		patience = 0 // It was waited for already, before the kubelet was told which devices to take.
	}
	late := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, patience, true,
		func(context.Context) (bool, error) { return a.pods.Exists(rest.uid), nil })
	if late != nil {
		a.missed = rest.uid
		return card, err
	}
	return a.known().Static(request, released)
}
