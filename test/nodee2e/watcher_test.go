package nodee2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// watchInterval is the time between two checks of the running containers.
const watchInterval = 50 * time.Millisecond

// watcher checks all the time, even during faults, that no card's running containers have more than its memory or its cores, and
// keeps all pods. mu guards the findings.
type watcher struct {
	node     *node
	informer cache.SharedIndexInformer

	mu sync.Mutex
	findings
}

// findings is what the watcher has found so far.
type findings struct {
	// overused describes the cards above their total.
	overused []string
	// pods holds all pods that were ever on the node by UID, in their last known state.
	pods   map[string]*corev1.Pod
	checks int
	err    error
}

func newWatcher(c *cluster) (*watcher, error) {
	w := &watcher{
		node: c.node, findings: findings{pods: map[string]*corev1.Pod{}},
		informer: coreinformers.NewFilteredPodInformer(c.Client, metav1.NamespaceAll, 0, cache.Indexers{},
			func(o *metav1.ListOptions) { o.FieldSelector = "spec.nodeName=" + c.node.name }),
	}
	_, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { w.podChanged(object) },
		UpdateFunc: func(_, object any) { w.podChanged(object) },
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			w.podChanged(object)
		},
	})
	return w, err
}

// run checks the node until ctx ends.
func (w *watcher) run(ctx context.Context) {
	go w.informer.RunWithContext(ctx)
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			w.check()
		}
	}
}

// check adds up what the running containers have of each card.
func (w *watcher) check() {
	running, err := w.node.running()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.checks++
	if err != nil {
		w.err = err
		return
	}
	used, by := map[int]use{}, map[int][]string{}
	for _, o := range running {
		if o.memory() == 0 {
			continue
		}
		cards, err := o.cards()
		if err != nil {
			w.overused = append(w.overused, err.Error())
			continue
		}
		for _, card := range cards {
			used[card] = use{used[card].memory + o.memory(), used[card].cores + o.cores()}
			by[card] = append(by[card], fmt.Sprintf("%s/%s %d %d%%", o.PodUID, o.Container, o.memory(), o.cores()))
		}
	}
	for card, use := range used {
		if use.exceeds(w.node.cards, card) {
			slices.Sort(by[card])
			w.overused = append(w.overused, fmt.Sprintf("%d and %d%% of card %d are in use: %v", use.memory, use.cores, card, by[card]))
		}
	}
}

func (w *watcher) podChanged(object any) {
	if pod, ok := object.(*corev1.Pod); ok && framework.GPUMemOf(pod) > 0 {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.pods[string(pod.UID)] = pod
	}
}

// found returns the findings so far.
func (w *watcher) found() findings {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := w.findings
	found.pods = maps.Clone(found.pods)
	found.overused = slices.Compact(slices.Sorted(slices.Values(found.overused)))
	return found
}

// wrongCards returns the containers that started with another card than the one that their pod's annotation named in the
// end, and the number of started GPU containers.
func (f findings) wrongCards(starts []observed) (wrong []string, started int) {
	for _, o := range starts {
		pod := f.pods[o.PodUID]
		if pod == nil || o.memory() == 0 && o.Env[protocol.AnnotationIndex] == "" {
			continue
		}
		started++
		cards, err := o.cards()
		annotated := pod.Annotations[protocol.AnnotationIndex]
		if want, _ := parseCards(annotated); err != nil || !slices.Equal(cards, want) {
			wrong = append(wrong, fmt.Sprintf("%s/%s, container %s: cards %v, annotation %q (%v)", pod.Namespace, pod.Name, o.Container, cards, annotated, err))
		}
	}
	return wrong, started
}
