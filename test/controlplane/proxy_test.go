package controlplane

import (
	"context"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

func TestProxy(t *testing.T) {
	c := StartForTest(t, Options{WithoutScheduler: true})
	must(t, c.CreateNodes(t.Context(), readyNode("node-0")))
	must(t, c.Apply(t.Context(), "testdata/accounts.yaml"))
	direct, err := c.ServiceAccountKubeconfig(t.Context(), "accounts", "admin")
	must(t, err)
	proxy := c.StartProxyForTest(t)
	path, err := proxy.Kubeconfig(direct)
	must(t, err)
	client := clientFor(t, path)

	bind := func(ctx context.Context, pod string) error {
		binding := &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: pod},
			Target:     corev1.ObjectReference{Kind: "Node", Name: "node-0"},
		}
		return client.CoreV1().Pods("default").Bind(ctx, binding, metav1.CreateOptions{})
	}
	createMap := func(t *testing.T, name string) {
		t.Helper()
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := c.Client.CoreV1().ConfigMaps("default").Create(t.Context(), object, metav1.CreateOptions{})
		must(t, err)
	}

	t.Run("a kubeconfig with a client certificate is rejected", func(t *testing.T) {
		if _, err := proxy.Kubeconfig(c.KubeconfigPath); err == nil {
			t.Error("no error")
		}
	})

	t.Run("without a fault requests are forwarded with the client's own user", func(t *testing.T) {
		createPod(t, client, "passes")
		must(t, bind(t.Context(), "passes"))
		awaitBound(t, c.Client, "passes")
		reader, err := c.ServiceAccountKubeconfig(t.Context(), "accounts", "reader")
		must(t, err)
		through, err := proxy.Kubeconfig(reader)
		must(t, err)
		_, err = clientFor(t, through).CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("listing pods as reader: got %v, want forbidden", err)
		}
	})

	t.Run("a watch is delayed, and the delay can be changed during the wait", func(t *testing.T) {
		late, soon := watchMaps(t, client), watchMaps(t, c.Client)
		const delay = 300 * time.Millisecond
		proxy.SetWatchDelay(delay)
		from := time.Now()
		createMap(t, "delayed")
		next(t, soon, "delayed")
		next(t, late, "delayed")
		if took := time.Since(from); took < delay {
			t.Errorf("the event came after %v, want %v at least", took, delay)
		}

		proxy.SetWatchDelay(forever)
		createMap(t, "held")
		next(t, soon, "held")
		select {
		case event := <-late.ResultChan():
			t.Errorf("an event passed a paused watch: %v", event)
		default:
		}
		proxy.SetWatchDelay(0)
		next(t, late, "held")
	})

	t.Run("HoldAnswer holds an answer until the client gives up", func(t *testing.T) {
		injection := proxy.Inject(Bindings, 1, HoldAnswer)
		defer injection.Lift()
		createPod(t, client, "unanswered")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		result := make(chan error, 1)
		go func() { result <- bind(ctx, "unanswered") }()
		awaitBound(t, c.Client, "unanswered")
		cancel()
		if err := <-result; err == nil {
			t.Error("the binding was answered")
		}
	})

	t.Run("Hold drops a request if the client gives up", func(t *testing.T) {
		injection := proxy.Inject(Bindings, 1, Hold)
		createPod(t, client, "dropped")
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() { result <- bind(ctx, "dropped") }()
		await(t, "the binding is held", func(context.Context) (bool, error) { return injection.Hits() == 1, nil })
		cancel()
		if err := <-result; err == nil {
			t.Error("the binding was answered")
		}
		await(t, "the proxy has dropped it", func(context.Context) (bool, error) { return proxy.busy() == 0, nil })
		injection.Lift()
		pod, err := c.Client.CoreV1().Pods("default").Get(t.Context(), "dropped", metav1.GetOptions{})
		must(t, err)
		if pod.Spec.NodeName != "" {
			t.Error("the pod is bound")
		}
	})

	t.Run("Answer sends errors in the API server's format", func(t *testing.T) {
		tests := map[int]func(error) bool{
			http.StatusInternalServerError: apierrors.IsInternalError,
			http.StatusServiceUnavailable:  apierrors.IsServiceUnavailable,
			http.StatusTooManyRequests:     apierrors.IsTooManyRequests,
			http.StatusGatewayTimeout:      apierrors.IsTimeout,
		}
		for status, is := range tests {
			injection := proxy.Inject(Everything, 0, Answer(status, 0))
			if _, err := client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{}); !is(err) {
				t.Errorf("status %d was read as %v", status, err)
			}
			injection.Lift()
		}
		injection := proxy.Inject(Everything, 1, Answer(http.StatusTooManyRequests, 1))
		defer injection.Lift()
		if _, err := client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{}); err != nil || injection.Hits() != 1 {
			t.Errorf("with Retry-After, client-go returned %v after %d hits", err, injection.Hits())
		}
	})

	t.Run("Slow delays a request, CutConnection drops it", func(t *testing.T) {
		const delay = 50 * time.Millisecond
		slow := proxy.Inject(Everything, 1, Slow(delay))
		defer slow.Lift()
		from := time.Now()
		_, err := client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{})
		must(t, err)
		if took := time.Since(from); took < delay {
			t.Errorf("it took %v, want %v at least", took, delay)
		}
		createPod(t, client, "unbound")
		cut := proxy.Inject(Bindings, 1, CutConnection)
		defer cut.Lift()
		if err := bind(t.Context(), "unbound"); err == nil {
			t.Error("the binding was answered")
		}
		pod, err := c.Client.CoreV1().Pods("default").Get(t.Context(), "unbound", metav1.GetOptions{})
		must(t, err)
		if pod.Spec.NodeName != "" {
			t.Error("the pod is bound")
		}
	})

	t.Run("Blackhole holds everything until it is healed", func(t *testing.T) {
		watching := watchMaps(t, client)
		heal := proxy.Blackhole()
		createMap(t, "swallowed")
		result := make(chan error, 1)
		go func() {
			_, err := client.CoreV1().Nodes().Get(t.Context(), "node-0", metav1.GetOptions{})
			result <- err
		}()
		await(t, "the request is held", func(context.Context) (bool, error) { return proxy.busy() == 2, nil })
		select {
		case err := <-result:
			t.Errorf("the request was answered: %v", err)
		case event := <-watching.ResultChan():
			t.Errorf("an event was forwarded: %v", event)
		default:
		}
		heal()
		must(t, <-result)
		next(t, watching, "swallowed")
	})

}

// busy returns the number of connections with a request, watches included.
func (p *Proxy) busy() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, state := range p.connections {
		if state == http.StateActive {
			n++
		}
	}
	return n
}

// watchMaps watches ConfigMaps from now on.
func watchMaps(t *testing.T, client kubernetes.Interface) watch.Interface {
	t.Helper()
	list, err := client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	must(t, err)
	watching, err := client.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	must(t, err)
	t.Cleanup(watching.Stop)
	return watching
}

// next waits for the event of the named ConfigMap.
func next(t *testing.T, watching watch.Interface, name string) {
	t.Helper()
	for {
		select {
		case event, open := <-watching.ResultChan():
			if !open {
				t.Fatalf("the watch ended before the event of %s", name)
			}
			if object, ok := event.Object.(*corev1.ConfigMap); ok && object.Name == name {
				return
			}
		case <-time.After(readyTimeout):
			t.Fatalf("no event of %s", name)
		}
	}
}
