package clustercache

import (
	"context"
	"fmt"
	"slices"
	"time"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// PodGroupHandler receives the changes of PodGroups, in the order of the watch.
type PodGroupHandler interface {
	// PodGroupsServed is called before the first pod is reported, if the API server has PodGroups. Otherwise no method is called.
	PodGroupsServed()
	// PodGroupUpdated reports a new or a changed PodGroup. It has only identity and spec.
	PodGroupUpdated(group *schedulingv1beta1.PodGroup)
	PodGroupDeleted(namespace, name string)
}

// discoveryInterval is the pause between attempts to find out whether the API server has PodGroups, and discoveryTimeout bounds one.
const discoveryInterval, discoveryTimeout = time.Second, 3 * time.Second

// AddPodGroupHandler registers a handler for PodGroups, and makes the cache sync wait for them if the API server has any. Without it
// they are not watched. It must be called after AddHandler and before Run.
func (c *Cache) AddPodGroupHandler(h PodGroupHandler) { c.podGroups = h }

// watchPodGroups prepares the watch of PodGroups if a handler is registered and the API server has them. It waits until the API
// server answers, or ctx ends.
func (c *Cache) watchPodGroups(ctx context.Context) {
	logger := klog.FromContext(ctx)
	served, err := c.hasPodGroups(ctx)
	for err != nil {
		hindrance := err
		c.hindrance.Store(&hindrance)
		logger.Info("Waiting for the API server", "reason", err.Error())
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(discoveryInterval):
		}
		served, err = c.hasPodGroups(ctx)
	}
	switch {
	case c.podGroups == nil:
		return
	case !served:
		logger.Info("Native groups are off, because the API server has no PodGroups: pods with spec.schedulingGroup are placed one by one. "+
			"PodGroups need the feature gate GenericWorkload, and --runtime-config="+podGroupVersion+"=true; restart the extender afterwards",
			"groupVersion", podGroupVersion)
		return
	}
	c.podGroups.PodGroupsServed()
	_ = c.watch("podgroups", c.factory.Scheduling().V1beta1().PodGroups().Informer(), podGroupEvents(c.podGroups)) // It begins later, so this can't fail.
	logger.Info("Native groups are on", "groupVersion", podGroupVersion)
}

var podGroupVersion = schedulingv1beta1.SchemeGroupVersion.String()

func (c *Cache) hasPodGroups(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, discoveryTimeout)
	defer cancel()
	list, err := c.Client.Discovery().ServerResourcesForGroupVersionWithContext(ctx, podGroupVersion)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("finding out whether the API server has PodGroups: %w", err)
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "podgroups" }), nil
}

func podGroupEvents(h PodGroupHandler) cache.ResourceEventHandler {
	updated := func(_, group *schedulingv1beta1.PodGroup) { h.PodGroupUpdated(group) }
	return eventHandlers(updated, func(group *schedulingv1beta1.PodGroup) { h.PodGroupDeleted(group.Namespace, group.Name) })
}
