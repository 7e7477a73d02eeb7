package nodee2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// watchEvery is the interval at which the running containers are checked.
const watchEvery = 50 * time.Millisecond

// watcher checks the node all the time, even during faults: the memory of each card that running containers have, and the
// memory that annotations assign. It has its own lock.
type watcher struct {
	node     *node
	informer cache.SharedIndexInformer

	mu sync.Mutex
	// overfull and overpromised hold the findings of cards above their total, by running containers and by annotations.
	overfull, overpromised map[string]bool
	// pods holds all pods that were ever on the node, in their last known state.
	pods map[string]*corev1.Pod
	// repaired holds the pods whose annotation changed from one card to another.
	repaired map[string]string
	looks    int
	fullest  map[int]int64
	err      error
}

func newWatcher(r *rig) (*watcher, error) {
	w := &watcher{
		node: r.node, overfull: map[string]bool{}, overpromised: map[string]bool{}, pods: map[string]*corev1.Pod{},
		repaired: map[string]string{}, fullest: map[int]int64{},
		informer: coreinformers.NewFilteredPodInformer(r.bed.Client, metav1.NamespaceAll, 0, cache.Indexers{},
			func(o *metav1.ListOptions) { o.FieldSelector = "spec.nodeName=" + r.node.name }),
	}
	_, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { w.note(object) },
		UpdateFunc: func(_, object any) { w.note(object) },
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			w.note(object)
		},
	})
	return w, err
}

// run checks the node until ctx ends.
func (w *watcher) run(ctx context.Context) {
	go w.informer.RunWithContext(ctx)
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			w.look()
		}
	}
}

// look adds up the memory of each card that the running containers were given.
func (w *watcher) look() {
	seen, err := w.node.running()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	if err != nil {
		w.err = err
		return
	}
	used, who := map[int]int64{}, map[int][]string{}
	for _, s := range seen {
		if s.memory() == 0 {
			continue
		}
		card, err := s.card()
		if err != nil {
			w.overfull[err.Error()] = true
			continue
		}
		used[card] += s.memory()
		who[card] = append(who[card], fmt.Sprintf("%s/%s %d", s.PodUID, s.Container, s.memory()))
	}
	for card, memory := range used {
		w.fullest[card] = max(w.fullest[card], memory)
		if card >= len(w.node.cards) || memory > gibibytes(w.node.cards[card]) {
			slices.Sort(who[card])
			w.overfull[fmt.Sprintf("containers hold %d of card %d: %v", memory, card, who[card])] = true
		}
	}
}

// note records a pod's latest state and adds up the memory that annotations assign.
func (w *watcher) note(object any) {
	pod, ok := object.(*corev1.Pod)
	if !ok || memoryOf(pod) == 0 {
		return
	}
	var pods []corev1.Pod
	for _, object := range w.informer.GetStore().List() {
		if p, ok := object.(*corev1.Pod); ok {
			pods = append(pods, *p)
		}
	}
	who, used, _ := promised(pods)
	w.mu.Lock()
	defer w.mu.Unlock()
	uid := string(pod.UID)
	if before := w.pods[uid]; before != nil {
		was, is := before.Annotations[protocol.AnnotationIndex], pod.Annotations[protocol.AnnotationIndex]
		if was != "" && was != is {
			w.repaired[uid] = fmt.Sprintf("%s/%s: from card %s to %s", pod.Namespace, pod.Name, was, is)
		}
	}
	w.pods[uid] = pod
	for card, memory := range used {
		if card >= len(w.node.cards) || memory > gibibytes(w.node.cards[card]) {
			w.overpromised[fmt.Sprintf("card %d is promised %d: %v", card, memory, who[card])] = true
		}
	}
}

// findings is the watcher's result so far.
type findings struct {
	Overfull, Overpromised, Repaired []string
	Looks                            int
	Fullest                          map[int]int64
	Pods                             map[string]*corev1.Pod
	Err                              error
}

func (w *watcher) findings() findings {
	w.mu.Lock()
	defer w.mu.Unlock()
	return findings{
		Overfull:     slices.Sorted(maps.Keys(w.overfull)),
		Overpromised: slices.Sorted(maps.Keys(w.overpromised)),
		Repaired:     slices.Sorted(maps.Values(w.repaired)),
		Looks:        w.looks, Fullest: maps.Clone(w.fullest), Pods: maps.Clone(w.pods), Err: w.err,
	}
}

// mistaken returns the containers that started with another card than the one that their pod's annotation named in the end.
func (f findings) mistaken(testimonies []sighting) (wrong []string, counted int) {
	for _, s := range testimonies {
		pod := f.Pods[s.PodUID]
		if pod == nil || s.memory() == 0 && s.Env[protocol.AnnotationIndex] == "" {
			continue
		}
		counted++
		card, err := s.card()
		if annotated := pod.Annotations[protocol.AnnotationIndex]; err != nil || strconv.Itoa(card) != annotated {
			wrong = append(wrong, fmt.Sprintf("%s/%s, container %s: card %d, annotation %q (%v)", pod.Namespace, pod.Name, s.Container, card, annotated, err))
		}
	}
	return wrong, counted
}
