package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
)

// testExamples: the API server and the guard accept the examples as they are. Of a LeaderWorkerSet, which this API server doesn't know, they accept
// the pods.
func (c *cluster) testExamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(controlplane.Repository(t), "deploy", "examples", "*.yaml"))
	must(t, err)
	if len(files) < 4 {
		t.Errorf("examples: %v", files)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			must(t, err)
			if !strings.Contains(string(text), string(protocol.ResourceMemory)) || strings.Contains(string(text), ":latest") {
				t.Error("it asks for no GPU memory, or names an image without a version")
			}
			if !strings.Contains(string(text), "kind: LeaderWorkerSet") {
				out := c.helm.shell(t, "kubectl apply --dry-run=server --validate=strict --filename="+file+" 2>&1")
				if strings.Contains(out, "Warning") {
					t.Error(out)
				}
				return
			}
			var set struct {
				Spec struct {
					LeaderWorkerTemplate struct{ WorkerTemplate corev1.PodTemplateSpec }
				}
			}
			must(t, yaml.Unmarshal(text, &set))
			template := set.Spec.LeaderWorkerTemplate.WorkerTemplate
			template.Name = "worker"
			pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
			if protocol.PodRequest(pod) == 0 || !protocol.InGroup(pod) {
				t.Error("its pods ask for no GPU memory, or are in no group")
			}
			_, err = c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			must(t, err)
		})
	}
}
