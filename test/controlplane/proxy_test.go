package controlplane

import (
	"context"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/test/check"
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

// readyNode returns a node to which pods can be bound.
func readyNode(name string) *corev1.Node {
	resources := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourcePods: resource.MustParse("1000")}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Capacity: resources, Allocatable: resources, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}}
}

func createPod(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	_, err := client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
}

func awaitBound(t *testing.T, client kubernetes.Interface, name string) (node string) {
	t.Helper()
	await(t, "pod "+name+" is bound", func(ctx context.Context) (bool, error) {
		pod, err := client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		node = pod.Spec.NodeName
		return node != "", nil
	})
	return node
}

func await(t *testing.T, what string, condition wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, readyTimeout, true, condition); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

func clientFor(t *testing.T, kubeconfig string) kubernetes.Interface {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	must(t, err)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

var must = check.Must
