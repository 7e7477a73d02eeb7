package neighbours

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

const (
	kueueNamespace = "kueue-system"
	kueueQueue     = "kueue.x-k8s.io/queue-name"
	kueuePriority  = "kueue.x-k8s.io/priority-class"
	kueueGate      = "kueue.x-k8s.io/admission"
)

// TestKueue: Kueue admits Jobs by the quota of the documentation's queue, and gpushare places their pods.
func TestKueue(t *testing.T) {
	k := startKueue(t)

	// A Job within the quota runs, and the next one stays suspended until one ends.
	t.Run("quota", func(t *testing.T) {
		q := k.newQueue(t)
		q.submit(q.Pod("first", 16), 2)
		q.submit(q.Pod("second", 16), 2)
		q.waitBound(map[string]int{"first": 2, "second": 2})
		q.submit(q.Pod("third", 8), 1)
		q.submit(q.Pod("cores", 8).Cores(50), 1)
		q.WaitEvent("", "insufficient unused quota for aliyun.com/gpu-mem in flavor shared-cards, 8 more needed")
		q.WaitEvent("", "resource aliyun.com/gpu-core.percentage unavailable in ClusterQueue")
		q.waitBound(map[string]int{"first": 2, "second": 2})
		q.end("first")
		q.waitBound(map[string]int{"second": 2, "third": 1})
	})

	// A group is bound as a whole, each time that Kueue starts its Job. What Kueue evicts frees its cards.
	t.Run("groups", func(t *testing.T) {
		q := k.newQueue(t)
		q.Place(q.Pod("single", 16)) // In no queue, so that quota is free while cards aren't.
		q.submit(q.Pod("train", 16).Group("train", 4), 4)
		q.waitPending("train", 4, "there is no room for all members at once")
		q.Delete("single")
		q.waitBound(map[string]int{"train": 4})

		q.submit(q.Pod("urgent", 16).Group("urgent", 4).Label(kueuePriority, "urgent"), 4)
		q.waitBound(map[string]int{"urgent": 4})
		q.WaitEvent("", "Preempted", "prioritization in the ClusterQueue")
		q.end("urgent")
		q.waitBound(map[string]int{"train": 4})

		q.apply("stopPolicy: HoldAndDrain")
		q.waitBound(map[string]int{})
		q.apply("stopPolicy: None")
		q.waitBound(map[string]int{"train": 4})
	})

	// A Job has quota, and its memory is free in pieces only. With waitForPodsReady Kueue evicts and requeues it.
	t.Run("pieces", func(t *testing.T) {
		k.restart(t, "waitForPodsReady: {timeout: 5s, requeuingStrategy: {backoffBaseSeconds: 1}}")
		q := k.newQueue(t)
		for i := range 4 {
			q.Place(q.Pod(fmt.Sprintf("piece-%d", i), 10))
		}
		q.submit(q.Pod("large", 12), 1)
		q.waitPending("large", 1, "no GPU card has enough free memory, though the node's cards together have")
		q.WaitEvent("", "EvictedDueToPodsReadyTimeout")
		q.Delete("piece-0")
		q.waitBound(map[string]int{"large": 1})
	})

	// A plain pod that waits for Kueue and for its fair share gets no turn before Kueue admits it.
	t.Run("fair share", func(t *testing.T) {
		k.restart(t, "")
		must(t, k.cluster.AllowFairShare(t.Context()))
		k.cluster.RestartExtenderWith(t, "--fair-share=dispatch")
		q := k.newQueue(t)
		gated := func(name string) *framework.PodWrapper {
			return q.Pod(name, 8).FairShareGate()
		}
		q.apply("stopPolicy: Hold")
		q.Create(gated("queued").Label(kueueQueue, "gpu"))
		q.Place(gated("later"))
		if gates := fmt.Sprint(q.Get("queued").Spec.SchedulingGates); !framework.ContainsAll(gates, protocol.GateFairShare, kueueGate) {
			t.Errorf("the pod in the stopped queue has the gates %s", gates)
		}
		q.apply("stopPolicy: None")
		q.WaitBound("queued")
		q.CheckLedger()
	})
}

// kueue is Kueue's manager.
type kueue struct {
	*controlplane.Process
	cluster  *framework.Cluster
	manifest string // The queue of the documentation.
	config   string // The path of the manager's configuration.
	fixed    string // What the tests don't change of it.
}

// startKueue starts a cluster, installs Kueue's chart there, and runs the manager as a process.
func startKueue(t *testing.T) *kueue {
	t.Helper()
	program, chart := part(t, "kueue"), part(t, "charts/kueue")
	c := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", ControlPlane: controlplane.Options{ControllerManager: true}})
	webhooks, health := controlplane.ReservePortForTest(t), controlplane.ReservePortForTest(t)
	manifest, err := os.ReadFile(filepath.Join(controlplane.Repository(t), "deploy", "neighbours", "kueue.yaml"))
	must(t, err)
	dir := t.TempDir()
	certificates := filepath.Join(dir, "certificates")

	// The API server calls the webhooks by a Service. This one leads to the process.
	rendered := template(t, "kueue", chart, "--namespace="+kueueNamespace,
		"--show-only=templates/crd/*", "--show-only=templates/webhook/manifests.yaml", "--show-only=templates/internalcert/secret.yaml")
	rendered = regexp.MustCompile(`(?m)^( +)path: /.*$`).ReplaceAll(rendered, []byte("$0\n${1}port: "+webhooks.String()))
	k := &kueue{cluster: c, manifest: string(manifest), config: filepath.Join(dir, "config.yaml"), fixed: fmt.Sprintf(`
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
namespace: %s
health: {healthProbeBindAddress: "%s"}
leaderElection: {leaderElect: false}
metrics: {bindAddress: "0"}
webhook: {host: 127.0.0.1, port: %s, certDir: %s}
integrations: {frameworks: [batch/job, pod]}
featureGates: {VisibilityOnDemand: false} # Its server listens on a fixed port.
`, kueueNamespace, health.Address(), webhooks, certificates)}
	k.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: `+kueueNamespace+`}
---
apiVersion: v1
kind: Service
metadata: {name: kueue-webhook-service, namespace: `+kueueNamespace+`}
spec: {type: ExternalName, externalName: localhost}
---
`+string(rendered))

	// Kueue makes the certificate of the webhooks, and waits until the kubelet has mounted it.
	mounted := func(ctx context.Context) error {
		if _, err := os.Stat(certificates); err == nil {
			return nil
		}
		secret, err := c.Client.CoreV1().Secrets(kueueNamespace).Get(ctx, "kueue-webhook-server-cert", metav1.GetOptions{})
		if err != nil || len(secret.Data) == 0 {
			return errors.Join(errors.New("there is no certificate yet"), err)
		}
		partial := certificates + ".partial"
		err = os.MkdirAll(partial, 0o700)
		for name, data := range secret.Data {
			err = errors.Join(err, os.WriteFile(filepath.Join(partial, name), data, 0o600))
		}
		return errors.Join(err, os.Rename(partial, certificates))
	}
	ready := controlplane.HTTPReady(health.URL("http") + "/readyz")
	k.Process = &controlplane.Process{
		Name: "kueue", Path: program, Args: []string{"--kubeconfig=" + c.KubeconfigPath, "--config=" + k.config},
		LogPath: filepath.Join(dir, "kueue.log"),
		Ready: func(ctx context.Context) error {
			if err := mounted(ctx); err != nil {
				return err
			}
			return ready(ctx)
		},
	}
	k.configure(t, "")
	controlplane.RunForTest(t, k.Process)
	k.apply(t, `
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 1000
`)
	return k
}

// configure writes the configuration, with these lines.
func (k *kueue) configure(t *testing.T, lines string) {
	t.Helper()
	must(t, os.WriteFile(k.config, []byte(k.fixed+lines), 0o600))
}

// restart restarts Kueue with these lines in its configuration.
func (k *kueue) restart(t *testing.T, lines string) {
	t.Helper()
	k.configure(t, lines)
	must(t, k.Restart(t.Context()))
}

// apply applies objects. The API server serves a kind some time after it was created.
func (k *kueue) apply(t *testing.T, objects string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "objects.yaml")
	must(t, os.WriteFile(path, []byte(objects), 0o600))
	framework.Eventually(t, "the API server accepts the objects", func(ctx context.Context) error { return k.cluster.Apply(ctx, path) })
}

// queue is a namespace with the queue of the documentation, and with two nodes of two cards of 16 GiB, which is its quota.
type queue struct {
	*framework.Namespace
	kueue *kueue
}

func (k *kueue) newQueue(t *testing.T) *queue {
	t.Helper()
	q := &queue{k.cluster.NewNamespace(t), k}
	for _, name := range []string{"a", "b"} {
		q.AddNodes(framework.MakeNode(name).Unit(gpu.GiB).Cards(2, 16))
	}
	q.apply("stopPolicy: None")
	return q
}

// apply applies the manifest of the documentation for this namespace, with this line in the ClusterQueue.
func (q *queue) apply(line string) {
	q.Helper()
	q.kueue.apply(q.T, strings.NewReplacer("team-a", q.ID, "  preemption:", "  "+line+"\n  preemption:").Replace(q.kueue.manifest))
}

// submit creates a Job of such pods, with the pod's name and labels.
func (q *queue) submit(pod *framework.PodWrapper, size int32) {
	q.Helper()
	pod.GracePeriod(0) // No kubelet confirms that it has ended.
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	jobs := q.Cluster.Client.BatchV1().Jobs(q.ID)
	q.Cleanup(func() {
		must(q, jobs.Delete(context.Background(), pod.Name, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationBackground)}))
	})
	labels := map[string]string{kueueQueue: "gpu"}
	maps.Copy(labels, pod.Labels)
	_, err := jobs.Create(q.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Labels: labels},
		Spec: batchv1.JobSpec{Parallelism: &size, Completions: &size, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations}, Spec: pod.Spec,
		}},
	}, metav1.CreateOptions{})
	must(q, err)
}

// end lets the pods of a Job end.
func (q *queue) end(job string) {
	q.Helper()
	pods, err := q.List(q.Context())
	must(q, err)
	for i := range pods {
		if pods[i].Labels[batchv1.JobNameLabel] == job {
			q.Patch(pods[i].Name, map[string]any{"status": map[string]any{"phase": corev1.PodSucceeded}}, "status")
		}
	}
}

// waitBound waits until the numbers of bound pods by Job are as wanted, and checks the ledger.
func (q *queue) waitBound(want map[string]int) {
	q.Helper()
	q.waitPods(fmt.Sprintf("bound: %v", want), want, func(pod *corev1.Pod) bool {
		return pod.Spec.NodeName != "" && pod.Status.Phase == corev1.PodPending
	})
	q.CheckLedger()
}

// waitPending waits until all pods of a Job are pending for the reason. No other pods may be.
func (q *queue) waitPending(job string, size int, reason string) {
	q.Helper()
	q.waitPods("pending: "+reason, map[string]int{job: size}, func(pod *corev1.Pod) bool {
		return pod.Spec.NodeName == "" && strings.Contains(framework.SchedulerMessage(pod), reason)
	})
}

// waitPods waits until the numbers of such pods by Job are as wanted.
func (q *queue) waitPods(what string, want map[string]int, such func(*corev1.Pod) bool) {
	q.Helper()
	q.Eventually(what, func(ctx context.Context) error {
		pods, err := q.List(ctx)
		if err != nil {
			return err
		}
		got, all := map[string]int{}, []string{}
		for i := range pods {
			pod := &pods[i]
			if job := pod.Labels[batchv1.JobNameLabel]; job != "" && such(pod) {
				got[job]++
			}
			all = append(all, fmt.Sprintf("%s %s %q: %s", pod.Name, pod.Status.Phase, pod.Spec.NodeName, framework.SchedulerMessage(pod)))
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("%v; pods: %q; Events: %q", got, all, q.Events(ctx, ""))
		}
		return nil
	})
}
