package leader

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	typedv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/util/retry"
)

// AnnotationLeader names the replica that wrote an EndpointSlice.
const AnnotationLeader = "gpushare.aliyun.com/leader"

// managedBy keeps Kubernetes' own controllers away from the slice.
const managedBy = "gpushare-extender"

// Endpoint is where a replica answers, and the Service, one without a selector, that leads there while it is the leader.
type Endpoint struct {
	Namespace, Service string
	// Address is an IP address that others reach this replica by.
	Address string
	Port    int32
	// PortName is the name of the Service's port; empty where the port has none.
	PortName string
}

func (e Endpoint) validate() error {
	address, err := netip.ParseAddr(e.Address)
	switch {
	case err != nil:
		return fmt.Errorf("the address to publish: %w", err)
	case address.IsUnspecified(), address.IsLoopback(), address.IsLinkLocalUnicast(), address.IsMulticast():
		return fmt.Errorf("the address to publish: others can't reach %s", address)
	case e.Port < 1 || e.Port > 65535:
		return fmt.Errorf("the port to publish: %d is none", e.Port)
	case e.Namespace == "" || e.Service == "":
		return fmt.Errorf("the Service to publish by needs a namespace and a name, not %q and %q", e.Namespace, e.Service)
	}
	return nil
}

// slice returns the EndpointSlice that publishes e. There is one for the Service, of the Service's name, so that each
// leader takes over the last one's.
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
			Name: new(e.PortName), Port: new(e.Port), Protocol: new(corev1.ProtocolTCP),
		}},
	}
}

// action is what is to be done to bring a slice to what it should be.
type action int

const (
	keep action = iota
	create
	update
	// replace: delete it and create it anew, since the family of its addresses can't change.
	replace
)

// compare decides what to do, and with which object. live is nil where there is none. What others have added to its
// labels and annotations stays.
func compare(live, want *discoveryv1.EndpointSlice) (action, *discoveryv1.EndpointSlice) {
	switch {
	case live == nil:
		return create, want
	case live.AddressType != want.AddressType:
		return replace, want
	}
	next := live.DeepCopy()
	next.Labels, next.Annotations = merged(live.Labels, want.Labels), merged(live.Annotations, want.Annotations)
	next.OwnerReferences = want.OwnerReferences
	next.Endpoints, next.Ports = want.Endpoints, want.Ports
	if apiequality.Semantic.DeepEqual(live, next) {
		return keep, live
	}
	return update, next
}

func merged(base, over map[string]string) map[string]string {
	out := maps.Clone(base)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, over)
	return out
}

// publisher keeps the EndpointSlice as it should be while this replica holds the Lease. It never takes it away: the
// next leader writes over it, and a replica that isn't the leader any more touches nothing. The slice belongs to the
// Service, so that Kubernetes takes it away with that; without the Service nothing is published.
type publisher struct {
	services corev1client.ServiceInterface
	slices   typedv1.EndpointSliceInterface
	want     *discoveryv1.EndpointSlice
	// holding is asked again before each write. Should the process freeze between the two, the write is refused:
	// it carries the resourceVersion, and the next leader has changed the slice.
	holding func() bool
}

func newPublisher(client kubernetes.Interface, e Endpoint, identity string, holding func() bool) *publisher {
	return &publisher{
		services: client.CoreV1().Services(e.Namespace), slices: client.DiscoveryV1().EndpointSlices(e.Namespace),
		want: e.slice(identity), holding: holding,
	}
}

// publish looks at the slice and writes it where it isn't as it should be. It says whether it wrote.
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
		if apierrors.IsNotFound(err) {
			live, err = nil, nil
		}
		if err != nil {
			return err
		}
		action, next := compare(live, want)
		if action == keep || !p.holding() {
			return nil
		}
		if err := p.write(ctx, action, live, next); err != nil {
			return err
		}
		written = true
		return nil
	})
	if err != nil {
		return written, fmt.Errorf("writing EndpointSlice %s/%s: %w", p.want.Namespace, p.want.Name, err)
	}
	return written, nil
}

// owned returns the slice as it should be, the Service its owner.
func (p *publisher) owned(ctx context.Context) (*discoveryv1.EndpointSlice, error) {
	service, err := p.services.Get(ctx, p.want.Name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("looking for its Service: %w", err)
	}
	want := p.want.DeepCopy()
	want.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: service.Name, UID: service.UID}}
	return want, nil
}

func (p *publisher) write(ctx context.Context, action action, live, next *discoveryv1.EndpointSlice) (err error) {
	switch action {
	case update:
		_, err = p.slices.Update(ctx, next, metav1.UpdateOptions{})
		return err
	case replace:
		err = p.slices.Delete(ctx, live.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{
			UID: &live.UID, ResourceVersion: &live.ResourceVersion,
		}})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	_, err = p.slices.Create(ctx, next, metav1.CreateOptions{})
	return err
}
