package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// TestUtilization runs the commands of the examples with a vllm that prints its arguments: the fraction of the card that it gets is that of the
// container's share, less what CUDA needs.
func TestUtilization(t *testing.T) {
	tools := t.TempDir()
	for name, script := range map[string]string{"vllm": `printf '%s\n' "$@"`, "ray": "true"} {
		if err := os.WriteFile(filepath.Join(tools, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	type template struct{ Spec corev1.PodSpec }
	for file, leader := range map[string]string{"vllm.yaml": "", "leaderworkerset.yaml": "LWS_WORKER_INDEX=0"} {
		var object struct {
			Spec struct {
				Template             template
				LeaderWorkerTemplate struct{ WorkerTemplate template }
			}
		}
		if err := yaml.Unmarshal([]byte(read(t, "deploy/examples/"+file)), &object); err != nil {
			t.Fatal(err)
		}
		container := append(object.Spec.Template.Spec.Containers, object.Spec.LeaderWorkerTemplate.WorkerTemplate.Spec.Containers...)[0]
		command := append(container.Command, container.Args...)
		for _, test := range []struct{ container, card, want string }{
			{"8", "16", "0.475"},
			{"16", "16", "0.95"},
			{"8192", "16276", "0.478152"}, // MiB
		} {
			run := exec.CommandContext(t.Context(), command[0], command[1:]...)
			run.Env = append(os.Environ(), "PATH="+tools+":"+os.Getenv("PATH"), leader,
				"ALIYUN_COM_GPU_MEM_CONTAINER="+test.container, "ALIYUN_COM_GPU_MEM_DEV="+test.card)
			out, err := run.CombinedOutput()
			if want := "--gpu-memory-utilization\n" + test.want + "\n"; err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s, %s of %s: %v, got %q, want %q", file, test.container, test.card, err, out, want)
			}
		}
	}
}
