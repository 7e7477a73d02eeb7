package nodee2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

// TestTrial follows docs/try.md on two real nodes whose containerd has no NVIDIA runtime as its default: the chart with simulated cards, the
// sample, and kubectl inspect gpushare. Then a device plugin with real cards, of the tests' fake driver, replaces the simulated one. The test
// adds only the images' names and --wait, and the image of the sample's pods is the one that writes down its environment.
func TestTrial(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	s := startInstallation(t)
	filesBefore := s.hostFiles()
	install, err := pages.Commands("docs/try.md", "Install")
	check.Must(t, err)
	const flags = " --wait --timeout=2m --set=images.extender.repository=gpushare.test/gpushare-extender,images.extender.tag=one," +
		"images.simulatedDevicePlugin.repository=gpushare.test/gpushare-device-plugin-simulated,images.simulatedDevicePlugin.tag=one," +
		"images.devicePlugin.repository=gpushare.test/gpushare-device-plugin,images.devicePlugin.tag=one,images.scheduler.repository=" + schedulerImage
	helm, label, _ := strings.Cut(install[0], "\n")
	if out := s.shell.run(t, "", helm+flags); !strings.Contains(out, "cards of the nodes that you label are simulated") {
		t.Errorf("the notes don't say that the cards are simulated:\n%s", out)
	}
	s.shell.run(t, "", label)

	s.runTrialPods(t)
	s.checkSimulated(t)
	s.replaceSimulated(t)
	s.uninstall(t)
	s.waitNothingLeft(t, filesBefore)
}

// runTrialPods creates the page's sample and waits until each container has the variables of the card that its pod's annotation names.
func (s *installation) runTrialPods(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.root, "deploy", "samples", "trial.yaml"))
	check.Must(t, err)
	var sample appsv1.Deployment
	check.Must(t, yaml.UnmarshalStrict(text, &sample))
	recordEnv(&sample.Spec.Template.Spec)
	_, err = s.Client.AppsV1().Deployments("default").Create(t.Context(), &sample, metav1.CreateOptions{})
	check.Must(t, err)
	framework.Eventually(t, "three containers have the variables of simulated cards", func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=trial"})
		if err != nil {
			return err
		}
		if len(pods.Items) != 3 {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		for i := range pods.Items {
			if err := s.checkTrialPod(&pods.Items[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *installation) checkTrialPod(pod *corev1.Pod) error {
	for _, n := range []*node{s.node, s.worker} {
		if n.name != pod.Spec.NodeName {
			continue
		}
		o, err := n.find(pod.UID, "trial")
		if err != nil {
			return err
		}
		card := pod.Annotations[protocol.AnnotationIndex]
		for name, want := range map[string]string{
			protocol.EnvVisibleDevices: fmt.Sprintf("GPU-simulated-%s-%s", n.name, card), protocol.AnnotationIndex: card, protocol.EnvContainer: "6",
		} {
			if got := o.Env[name]; got != want {
				return fmt.Errorf("pod %s on node %s: %s is %q, want %q", pod.Name, n.name, name, got, want)
			}
		}
		return nil
	}
	return fmt.Errorf("pod %s is on node %q: %+v", pod.Name, pod.Spec.NodeName, pod.Status)
}

// checkSimulated checks that each view marks the four cards as simulated.
func (s *installation) checkSimulated(t *testing.T) {
	t.Helper()
	run, err := pages.Commands("docs/try.md", "Run pods")
	check.Must(t, err)
	command := "PATH=$PWD/bin:$PATH; " + strings.TrimSpace(run[1])
	for flags, want := range map[string]string{
		"":           "Simulated Cards: on real and 1 other node, for a trial: no container can compute on them\n",
		" -o wide":   "2 x Simulated GPU (simulated)",
		" worker -d": "CARDS:      simulated for a trial",
	} {
		out := s.shell.run(t, "", command+flags)
		if !strings.Contains(out, want) {
			t.Errorf("kubectl inspect gpushare%s has no %q:\n%s", flags, want, out)
		}
		if flags == "" {
			t.Log(out)
		}
	}
	plugin := "$(kubectl get pod -n kube-system -l app.kubernetes.io/component=device-plugin -o name --field-selector spec.nodeName=" + s.node.name + ")"
	if log := s.shell.run(t, "", "kubectl logs -n kube-system "+plugin); !strings.Contains(log, "the cards of this node are simulated") {
		t.Errorf("the device plugin's log doesn't say that the cards are simulated:\n%s", log)
	}
	framework.Eventually(t, "the metrics count four simulated cards", func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=scheduler"})
		if err != nil || len(pods.Items) != 1 {
			return errors.Join(fmt.Errorf("%d pods of the second scheduler", len(pods.Items)), err)
		}
		const metric = "gpushare_extender_simulated_cards"
		series, err := framework.Scrape(ctx, "http://"+pods.Items[0].Status.PodIP+":12347/metrics", metric)
		if err == nil && series[metric] != 4 {
			err = fmt.Errorf("the metric is %v", series)
		}
		return err
	})
}

// replaceSimulated gives the node with the tests' fake driver a device plugin for real cards, and checks that the mark is gone there.
func (s *installation) replaceSimulated(t *testing.T) {
	t.Helper()
	s.shell.run(t, "", "kubectl delete -f deploy/samples/trial.yaml --wait --timeout=1m; kubectl label node "+s.worker.name+" gpushare-")
	_, err := s.Client.NodeV1().RuntimeClasses().Create(t.Context(),
		&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}, metav1.CreateOptions{})
	check.Must(t, err)
	s.shell.run(t, "", "helm upgrade gpushare deploy/helm/gpushare --namespace kube-system --reset-then-reuse-values --wait --timeout=2m "+
		"--set devicePlugin.simulatedCards.count=0,devicePlugin.runtimeClassName=nvidia")
	check.Must(t, s.node.awaitCards(t.Context()))
	var report struct { // inspect.Report is only for writing.
		Nodes []struct {
			Simulated bool
			Problems  []string
			Cards     []struct{ UUID string }
		}
	}
	check.Must(t, json.Unmarshal([]byte(s.shell.run(t, "", "bin/kubectl-inspect-gpushare -o json "+s.node.name)), &report))
	if len(report.Nodes) != 1 {
		t.Fatalf("%d nodes, want that with real cards", len(report.Nodes))
	}
	node := report.Nodes[0]
	if node.Simulated || len(node.Cards) != len(s.node.cards) || node.Cards[0].UUID != cardUUID(0) || len(node.Problems) > 0 {
		t.Errorf("the node with real cards: %+v", node)
	}
}
