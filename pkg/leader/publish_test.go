package leader

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/test/check"
)

func endpoint(address string) Endpoint {
	return Endpoint{Namespace: "kube-system", Service: "gpushare-extender", Address: address, Port: 12345}
}

// theService returns the Service that owns the slices.
func theService() *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "gpushare-extender", UID: "service"}}
}

// ofService returns the slice with the Service as its owner.
func ofService(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: "gpushare-extender", UID: "service"}}
	return s
}

func TestSlice(t *testing.T) {
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: "gpushare-extender",
			Labels: map[string]string{
				"kubernetes.io/service-name":             "gpushare-extender",
				"endpointslice.kubernetes.io/managed-by": "gpushare-extender",
			},
			Annotations: map[string]string{"gpushare.aliyun.com/leader": "a"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{"10.0.0.7"},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		}},
		Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(12345)), Protocol: new(corev1.ProtocolTCP)}},
	}
	check.Equal(t, "the result", want, endpoint("10.0.0.7").slice("a"))
	if got := endpoint("fd00::7").slice("a").AddressType; got != discoveryv1.AddressTypeIPv6 {
		t.Errorf("fd00::7 is of type %s", got)
	}
}

func TestInvalidEndpoint(t *testing.T) {
	tests := map[string]func(*Endpoint){
		"a name instead of an address": func(e *Endpoint) { e.Address = "localhost" },
		"no address":                   func(e *Endpoint) { e.Address = "" },
		"a loopback address":           func(e *Endpoint) { e.Address = "127.0.0.1" },
		"unspecified":                  func(e *Endpoint) { e.Address = "0.0.0.0" },
		"link-local":                   func(e *Endpoint) { e.Address = "fe80::1" },
		"port 0":                       func(e *Endpoint) { e.Port = 0 },
		"port too large":               func(e *Endpoint) { e.Port = 65536 },
		"no service":                   func(e *Endpoint) { e.Service = "" },
		"no namespace":                 func(e *Endpoint) { e.Namespace = "" },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			e := endpoint("10.0.0.7")
			must(t, e.validate())
			spoil(&e)
			if err := e.validate(); err == nil {
				t.Errorf("%+v: no error", e)
			}
		})
	}
}

// recorded returns the verbs of the client's calls, without reads.
func recorded(client *fake.Clientset) string {
	var verbs []string
	for _, a := range client.Actions() {
		if a.GetVerb() != "get" {
			verbs = append(verbs, a.GetVerb())
		}
	}
	return strings.Join(verbs, " ")
}

func TestPublish(t *testing.T) {
	want := ofService(endpoint("10.0.0.7").slice("a"))
	changed := func(change func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
		s := want.DeepCopy()
		s.ResourceVersion, s.UID = "7", "uid"
		change(s)
		return s
	}
	tests := map[string]struct {
		live *discoveryv1.EndpointSlice
		want string
	}{
		"no slice": {nil, "create"},
		"equal":    {changed(func(*discoveryv1.EndpointSlice) {}), ""},
		"with labels and annotations of others": {changed(func(s *discoveryv1.EndpointSlice) {
			s.Labels["theirs"], s.Annotations["theirs"] = "1", "1"
		}), ""},
		"another leader's":  {changed(func(s *discoveryv1.EndpointSlice) { s.Annotations[AnnotationLeader] = "b" }), "update"},
		"another address":   {changed(func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "10.0.0.8" }), "update"},
		"not ready":         {changed(func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Conditions.Ready = new(false) }), "update"},
		"no endpoints":      {changed(func(s *discoveryv1.EndpointSlice) { s.Endpoints = nil }), "update"},
		"another port":      {changed(func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = new(int32(1)) }), "update"},
		"no labels":         {changed(func(s *discoveryv1.EndpointSlice) { s.Labels = nil }), "update"},
		"no owner":          {changed(func(s *discoveryv1.EndpointSlice) { s.OwnerReferences = nil }), "update"},
		"another manager":   {changed(func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelManagedBy] = "x" }), "update"},
		"addresses of IPv6": {ofService(endpoint("fd00::8").slice("b")), "delete create"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(theService())
			if test.live != nil {
				client = fake.NewClientset(theService(), test.live)
			}
			client.PrependReactor("update", "endpointslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if s := action.(clienttesting.UpdateAction).GetObject().(*discoveryv1.EndpointSlice); s.ResourceVersion != "7" {
					t.Errorf("update with resource version %q", s.ResourceVersion)
				}
				return false, nil, nil
			})
			p := newPublisher(client, endpoint("10.0.0.7"), "a", func() bool { return true })
			if written, err := p.publish(t.Context()); err != nil || written != (test.want != "") {
				t.Errorf("written %v, error %v", written, err)
			}
			if got := recorded(client); got != test.want {
				t.Errorf("calls %q, want %q", got, test.want)
			}
			live, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(t.Context(), "gpushare-extender", metav1.GetOptions{})
			must(t, err)
			check.Equal(t, "published", merge(live, want), live)
		})
	}
}

// During an uninstallation a replica can run longer than its Service. It must create no slice then.
func TestPublishWithoutService(t *testing.T) {
	client := fake.NewClientset()
	p := newPublisher(client, endpoint("10.0.0.7"), "a", func() bool { return true })
	if written, err := p.publish(t.Context()); written || !apierrors.IsNotFound(err) {
		t.Errorf("written %v, error %v", written, err)
	}
	if got := recorded(client); got != "" {
		t.Errorf("calls %q", got)
	}
}

func TestPublishAfterLostLease(t *testing.T) {
	for name, answers := range map[string]int{"lost before the read": 0, "lost after the read": 1} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(theService(), endpoint("10.0.0.8").slice("b"))
			asked := 0
			p := newPublisher(client, endpoint("10.0.0.7"), "a", func() bool { asked++; return asked <= answers })
			if written, err := p.publish(t.Context()); written || err != nil {
				t.Errorf("written %v, error %v", written, err)
			}
			if got := recorded(client); got != "" {
				t.Errorf("calls %q", got)
			}
		})
	}
}

func TestPublishConflict(t *testing.T) {
	client := fake.NewClientset(theService(), endpoint("10.0.0.8").slice("b"))
	conflict := true
	client.PrependReactor("update", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !conflict {
			return false, nil, nil
		}
		conflict = false
		return true, nil, apierrors.NewConflict(discoveryv1.Resource("endpointslices"), "gpushare-extender", errors.New("changed"))
	})
	p := newPublisher(client, endpoint("10.0.0.7"), "a", func() bool { return true })
	if written, err := p.publish(context.Background()); !written || err != nil {
		t.Errorf("written %v, error %v", written, err)
	}
	if got := recorded(client); got != "update update" {
		t.Errorf("calls %q", got)
	}
}
