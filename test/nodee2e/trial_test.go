package nodee2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

// TestTrial follows docs/try.md on two real nodes whose containerd has no NVIDIA runtime as its default: the chart with simulated cards, the
// sample, and kubectl inspect gpushare. The test adds only the images' names and --wait, and the image of the sample's pods is the one that writes down
// its environment.
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

// checkSimulated checks that the page's command marks the cards as simulated.
func (s *installation) checkSimulated(t *testing.T) {
	t.Helper()
	run, err := pages.Commands("docs/try.md", "Run pods")
	check.Must(t, err)
	command := "PATH=$PWD/bin:$PATH; " + strings.TrimSpace(run[1])
	if out := s.shell.run(t, "", command); !strings.Contains(out, "Simulated Cards: on real and 1 other node, for a trial: no container can compute on them\n") {
		t.Errorf("kubectl inspect gpushare doesn't say that the cards are simulated:\n%s", out)
	}
}
