package controlplane

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
)

// Find returns the matching objects of all kinds except Events, each as kind/name.
func (c *ControlPlane) Find(ctx context.Context, matches func(metav1.Object) bool) (found []string, err error) {
	kinds, err := discovery.ServerPreferredResources(c.Client.Discovery())
	if err != nil {
		return nil, fmt.Errorf("listing all kinds: %w", err)
	}
	config := rest.CopyConfig(c.Config)
	config.WarningHandler = rest.NoWarnings{} // Some kinds are deprecated.
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	for _, list := range kinds {
		group, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, kind := range list.APIResources {
			if !slices.Contains(kind.Verbs, "list") || kind.Name == "events" {
				continue
			}
			objects, err := client.Resource(group.WithResource(kind.Name)).List(ctx, metav1.ListOptions{})
			if meta.IsNoMatchError(err) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("listing %s: %w", kind.Name, err)
			}
			for i := range objects.Items {
				if matches(&objects.Items[i]) {
					found = append(found, kind.Name+"/"+objects.Items[i].Name)
				}
			}
		}
	}
	return found, nil
}
