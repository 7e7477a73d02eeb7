package leader

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	typedv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/util/retry"
)

// AnnotationLeader names the replica that wrote an EndpointSlice.
const AnnotationLeader = "gpushare.aliyun.com/leader"

// managedBy is the label value that makes the EndpointSlice controllers ignore the slice.
const managedBy = "gpushare-extender"

// Endpoint is the address of a replica, and the Service without a selector that routes to it while it leads.
type Endpoint struct {
	Namespace, Service string
	// Address is the IP address at which clients reach this replica.
	Address string
	Port    int32
}

func (e Endpoint) validate() error {
	address, err := netip.ParseAddr(e.Address)
	switch {
	case err != nil:
		return fmt.Errorf("address to publish: %w", err)
	case address.IsUnspecified(), address.IsLoopback(), address.IsLinkLocalUnicast(), address.IsMulticast():
		return fmt.Errorf("address to publish: %s is not reachable from other hosts", address)
	case e.Port < 1 || e.Port > 65535:
		return fmt.Errorf("port to publish: must be 1 to 65535, got %d", e.Port)
	case e.Namespace == "" || e.Service == "":
		return fmt.Errorf("publishing the Service: namespace and name are required, got %q and %q", e.Namespace, e.Service)
	}
	return nil
}

// slice returns the EndpointSlice that publishes e. It has the Service's name, so that each leader overwrites the last one's.
func (e Endpoint) slice(identity string) *discoveryv1.EndpointSlice {
	family, address := discoveryv1.AddressTypeIPv4, netip.MustParseAddr(e.Address).Unmap()
	if address.Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   e.Namespace,
			Name:        e.Service,
			Labels:      map[string]string{discoveryv1.LabelServiceName: e.Service, discoveryv1.LabelManagedBy: managedBy},
			Annotations: map[string]string{AnnotationLeader: identity},
		},
		AddressType: family,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{address.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		}},
		Ports: []discoveryv1.EndpointPort{{
			Name: new(""), Port: new(e.Port), Protocol: new(corev1.ProtocolTCP),
		}},
	}
}

// merge returns live with the content of want. Labels and annotations that others have added stay.
func merge(live, want *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	next := live.DeepCopy()
	next.Labels, next.Annotations = labels.Merge(live.Labels, want.Labels), labels.Merge(live.Annotations, want.Annotations)
	next.OwnerReferences = want.OwnerReferences
	next.AddressType, next.Endpoints, next.Ports = want.AddressType, want.Endpoints, want.Ports
	return next
}

// publisher keeps the EndpointSlice up to date while this replica holds the Lease. It never deletes the slice: the next
// leader overwrites it. The Service owns the slice, so both are deleted together; without the Service nothing is published.
type publisher struct {
	services corev1client.ServiceInterface
	slices   typedv1.EndpointSliceInterface
	want     *discoveryv1.EndpointSlice
	// holding is checked right before each write. If the process is paused between the check and the write, the API server
	// rejects the write: it carries a resourceVersion, and the next leader has changed the slice.
	holding func() bool
}

func newPublisher(client kubernetes.Interface, e Endpoint, identity string, holding func() bool) *publisher {
	return &publisher{
		services: client.CoreV1().Services(e.Namespace), slices: client.DiscoveryV1().EndpointSlices(e.Namespace),
		want: e.slice(identity), holding: holding,
	}
}

// publish compares the slice and writes it if it differs. It reports whether it wrote.
func (p *publisher) publish(ctx context.Context) (written bool, err error) {
	err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
		if !p.holding() {
			return nil
		}
		want, err := p.owned(ctx)
		if err != nil {
			return err
		}
		live, err := p.slices.Get(ctx, want.Name, metav1.GetOptions{})
		absent := apierrors.IsNotFound(err)
		if err != nil && !absent {
			return err
		}
		next := merge(live, want)
		if !absent && apiequality.Semantic.DeepEqual(live, next) || !p.holding() {
			return nil
		}
		switch {
		case absent:
			_, err = p.slices.Create(ctx, want, metav1.CreateOptions{})
		case live.AddressType == want.AddressType:
			_, err = p.slices.Update(ctx, next, metav1.UpdateOptions{})
		default: // The address family of a slice is immutable.
			err = p.slices.Delete(ctx, live.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
				UID: &live.UID, ResourceVersion: &live.ResourceVersion,
			}})
			if err == nil || apierrors.IsNotFound(err) {
				_, err = p.slices.Create(ctx, want, metav1.CreateOptions{})
			}
		}
		written = err == nil
		return err
	})
	if err != nil {
		return written, fmt.Errorf("writing EndpointSlice %s/%s: %w", p.want.Namespace, p.want.Name, err)
	}
	return written, nil
}

// owned returns the wanted slice with the Service as its owner.
func (p *publisher) owned(ctx context.Context) (*discoveryv1.EndpointSlice, error) {
	service, err := p.services.Get(ctx, p.want.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("getting its Service: %w", err)
	}
	want := p.want.DeepCopy()
	want.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: service.Name, UID: service.UID}}
	return want, nil
}
