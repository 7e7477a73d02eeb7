package neighbours

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// workloads is a cluster with the controller of a kind of workload, which creates Jobs or StatefulSets.
type workloads struct{ *framework.Cluster }

// startWorkloads starts a cluster, applies the chart's kinds and webhooks, and runs the controller as a process. api is the
// apiVersion of the controller's configuration.
func startWorkloads(t *testing.T, name, api string) *workloads {
	t.Helper()
	program, chart := part(t, name), part(t, "charts/"+name)
	c := framework.StartForTest(t, framework.Options{
		MemoryUnit: "GiB", ExtenderArgs: []string{"--gang-hold=3s", "--gang-patience=8s"}, ControlPlane: controlplane.Options{ControllerManager: true},
	})
	w := &workloads{c}
	namespace, dir := name+"-system", t.TempDir()
	webhooks, health := controlplane.ReservePortForTest(t), controlplane.ReservePortForTest(t)

	// The API server calls the webhooks by a Service. This one leads to the process, which serves with a certificate for the Service's name,
	// as cert-manager would make it.
	service := name + "-webhook-service"
	certificate, key, err := cert.GenerateSelfSignedCertKey(service+"."+namespace+".svc", nil, nil)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "tls.crt"), certificate, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
	rendered := template(t, name, chart, "--namespace="+namespace, "--show-only=templates/webhook/*")
	rendered = regexp.MustCompile(`(?m)^( +)path: /.*$`).ReplaceAll(rendered, []byte("$0\n${1}port: "+webhooks.String()))
	bundle := base64.StdEncoding.EncodeToString(certificate)
	rendered = regexp.MustCompile(`(?m)^( +)clientConfig:$`).ReplaceAll(rendered, []byte("$0\n${1}  caBundle: "+bundle))
	var objects []string
	for object := range strings.SplitSeq(string(rendered), "\n---\n") {
		if !strings.Contains(object, "\nkind: Secret\n") && !strings.Contains(object, "\nkind: Service\n") {
			objects = append(objects, object)
		}
	}
	must(t, c.Apply(t.Context(), filepath.Join(chart, "crds")))
	w.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: `+namespace+`}
---
apiVersion: v1
kind: Service
metadata: {name: `+service+`, namespace: `+namespace+`}
spec: {type: ExternalName, externalName: localhost}
---
`+strings.Join(objects, "\n---\n"))

	config := filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
apiVersion: %s
kind: Configuration
health: {healthProbeBindAddress: "%s"}
leaderElection: {leaderElect: false}
metrics: {bindAddress: "0"}
webhook: {host: 127.0.0.1, port: %s, certDir: %s}
internalCertManagement: {enable: false}
`, api, health.Address(), webhooks, dir), 0o600))
	controlplane.RunForTest(t, &controlplane.Process{
		Name: name, Path: program, Args: []string{"--kubeconfig=" + c.KubeconfigPath, "--config=" + config, "--zap-devel=false"},
		LogPath: filepath.Join(c.Dir, "logs", name+".log"), Ready: controlplane.HTTPReady(health.URL("http") + "/readyz"),
	})
	return w
}

// apply applies objects. The API server serves a kind, and the controller its webhooks, some time after the start.
func (w *workloads) apply(t *testing.T, objects string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "objects.yaml")
	must(t, os.WriteFile(path, []byte(objects), 0o600))
	framework.Eventually(t, "the API server accepts the objects", func(ctx context.Context) error { return w.Apply(ctx, path) })
}

// workloadScene is a namespace with cards of 16 GiB, each for one pod of a workload.
type workloadScene struct {
	*framework.Namespace
	w *workloads
	// label is the label by which pods are counted.
	label string
}

func (w *workloads) scene(t *testing.T, cards int, label string) *workloadScene {
	t.Helper()
	s := &workloadScene{w.NewNamespace(t), w, label}
	s.addCards("cards", cards)
	return s
}

// addCards adds a node with as many cards.
func (s *workloadScene) addCards(name string, cards int) {
	s.Helper()
	s.AddNodes(framework.MakeNode(name).Unit(gpu.GiB).Cards(cards, 16))
}

// member returns a pod of a workload's template, which asks for a card and is in a group with this number of members.
func (s *workloadScene) member(number int) *framework.PodWrapper {
	return s.Pod("", 16).Group("train", number).GracePeriod(0) // No kubelet confirms that it has ended.
}

// create creates a workload, which ends with the test.
func (s *workloadScene) create(resource schema.GroupVersionResource, kind string, spec map[string]any) {
	s.Helper()
	client, err := dynamic.NewForConfig(s.w.Config)
	must(s, err)
	object := map[string]any{
		"apiVersion": resource.GroupVersion().String(), "kind": kind, "metadata": map[string]any{"name": "set", "namespace": s.ID}, "spec": spec,
	}
	text, err := yaml.Marshal(object)
	must(s, err)
	s.w.apply(s.T, string(text))
	s.Cleanup(func() {
		must(s, client.Resource(resource).Namespace(s.ID).Delete(context.Background(), "set", metav1.DeleteOptions{
			PropagationPolicy: new(metav1.DeletePropagationBackground),
		}))
	})
}

// podTemplate returns the template of such pods.
func podTemplate(pod *framework.PodWrapper) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations, Labels: pod.Labels}, Spec: pod.Spec}
}

// waitBound waits until the numbers of bound pods by label are as wanted, and checks the ledger.
func (s *workloadScene) waitBound(want map[string]int) (pods []corev1.Pod) {
	s.Helper()
	return s.waitCounts(fmt.Sprintf("bound: %v", want), func(got map[string]int) bool { return maps.Equal(got, want) })
}

// waitWhole waits until as many groups of this size are bound, and no other pods are.
func (s *workloadScene) waitWhole(groups, size int) (pods []corev1.Pod) {
	s.Helper()
	return s.waitCounts(fmt.Sprintf("%d groups of %d are bound", groups, size), func(got map[string]int) bool {
		return len(got) == groups && slices.Max(slices.Collect(maps.Values(got))) == size && slices.Min(slices.Collect(maps.Values(got))) == size
	})
}

// waitCounts waits until the numbers of bound pods by label are as wanted, and checks the ledger.
func (s *workloadScene) waitCounts(what string, wanted func(got map[string]int) bool) (pods []corev1.Pod) {
	s.Helper()
	s.Eventually(what, func(ctx context.Context) (err error) {
		if pods, err = s.List(ctx); err != nil {
			return err
		}
		got, all := map[string]int{}, []string{}
		for i := range pods {
			pod := &pods[i]
			if pod.Spec.NodeName != "" && pod.DeletionTimestamp == nil && pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded {
				got[pod.Labels[s.label]]++
			}
			all = append(all, fmt.Sprintf("%s %s %q: %s", pod.Name, pod.Status.Phase, pod.Spec.NodeName, framework.SchedulerMessage(pod)))
		}
		if !wanted(got) {
			return fmt.Errorf("%v; pods: %q; Events: %q", got, all, s.Events(ctx, ""))
		}
		return nil
	})
	s.CheckLedger()
	return pods
}

// waitReplaced waits until the numbers of bound pods by label are as wanted, and none is one of the former pods.
func (s *workloadScene) waitReplaced(former []corev1.Pod, want map[string]int) (pods []corev1.Pod) {
	s.Helper()
	s.Eventually("the pods are replaced", func(ctx context.Context) error {
		now, err := s.List(ctx)
		for i := range now {
			if slices.ContainsFunc(former, func(pod corev1.Pod) bool { return pod.UID == now[i].UID }) {
				return errors.Join(err, fmt.Errorf("%s is there", now[i].Name))
			}
		}
		return err
	})
	return s.waitBound(want)
}

// of returns the pods with this value of the label.
func (s *workloadScene) of(pods []corev1.Pod, value string) (out []corev1.Pod) {
	for i := range pods {
		if pods[i].Labels[s.label] == value {
			out = append(out, pods[i])
		}
	}
	return out
}

// waitRejected waits until as many pods are pending and were rejected because of their group.
func (s *workloadScene) waitRejected(want int) {
	s.Helper()
	s.Eventually(fmt.Sprintf("%d pods are rejected", want), func(ctx context.Context) error {
		pods, err := s.List(ctx)
		got := 0
		for i := range pods {
			if pods[i].Spec.NodeName == "" && strings.Contains(framework.SchedulerMessage(&pods[i]), "gang: ") {
				got++
			}
		}
		if got != want {
			err = errors.Join(err, fmt.Errorf("%d are; Events: %q", got, s.Events(ctx, "")))
		}
		return err
	})
}
