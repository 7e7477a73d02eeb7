package inspect

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/background"
)

// watch keeps the objects of the scope in informers. It calls draw with all of them at the start and after each change, also
// when changed is raised otherwise, until ctx ends or draw fails. draw must not change the objects.
func watch(ctx context.Context, client kubernetes.Interface, scope scope, changed background.Signal, draw func(Objects) error) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()

	nodes := coreinformers.NewFilteredNodeInformer(client, 0, cache.Indexers{}, func(options *metav1.ListOptions) {
		only := scope.nodeOptions()
		options.LabelSelector, options.FieldSelector = only.LabelSelector, only.FieldSelector
	})
	pods := coreinformers.NewFilteredPodInformer(client, scope.podsOnly, 0, cache.Indexers{}, func(options *metav1.ListOptions) {
		options.FieldSelector = scope.podOptions().FieldSelector
	})
	informers := []cache.SharedIndexInformer{pods, nodes}
	if scope.podsOnly != "" {
		informers = informers[:1]
	}
	for _, informer := range informers {
		if err := scope.prepare(informer, changed); err != nil {
			return fmt.Errorf("preparing to watch: %w", err)
		}
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	for _, informer := range informers {
		if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			return nil // ctx has ended.
		}
	}

	changed.Raise()                  // An empty cluster has no events.
	limiter := rate.NewLimiter(4, 1) // A busy cluster causes at most four draws per second.
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		if limiter.Wait(ctx) != nil {
			return nil // ctx has ended.
		}
		nodeList, _ := corelisters.NewNodeLister(nodes.GetIndexer()).List(labels.Everything()) // It reads memory only.
		podList, _ := corelisters.NewPodLister(pods.GetIndexer()).List(labels.Everything())
		objects := scope.objects(nodeList, podList)
		if scope.addPodGroups(ctx, client, &objects) != nil && ctx.Err() != nil { // Of other errors reachability tells the user.
			return nil
		}
		if err := draw(objects); err != nil {
			return err
		}
	}
}

func (s scope) prepare(informer cache.SharedIndexInformer, changed background.Signal) error {
	_, err := informer.AddEventHandler(cache.FilteringResourceEventHandler{
		FilterFunc: func(object any) bool { // Most pods of a cluster ask for no GPU memory.
			pod, isPod := object.(*corev1.Pod)
			return !isPod || s.coversPod(pod)
		},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed.Raise() },
			UpdateFunc: func(any, any) { changed.Raise() },
			DeleteFunc: func(any) { changed.Raise() },
		},
	})
	return errors.Join(err, informer.SetTransform(func(object any) (any, error) { return s.trim(object), nil }),
		// reachability shows errors to the user. A log line would corrupt the table.
		informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}))
}

// reachability is a round tripper that records whether the API server's last response was a success: the informers retry
// without reporting it. It is safe for concurrent use.
type reachability struct {
	next    http.RoundTripper
	changed background.Signal // Is raised when problem changes.
	problem atomic.Value      // A string; nil or empty while the server responds.
}

// warning returns a line for the user if the API server can't be read.
func (r *reachability) warning() string {
	if problem, _ := r.problem.Load().(string); problem != "" {
		return fmt.Sprintf("Warning: the API server can't be read, this may be old: %s\n", oneLine(problem))
	}
	return ""
}

// unreadable are status codes with which nothing can be read. Other 4xx codes are part of the informers' protocol.
var unreadable = []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests}

// RoundTrip implements http.RoundTripper.
func (r *reachability) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	problem := ""
	switch {
	case err != nil && request.Context().Err() != nil: // The client canceled the request.
		return response, err
	case err != nil:
		problem = err.Error()
	case response.StatusCode >= 500 || slices.Contains(unreadable, response.StatusCode):
		problem = "it answers " + response.Status
	}
	if r.problem.Swap(problem) != problem {
		r.changed.Raise()
	}
	return response, err
}
