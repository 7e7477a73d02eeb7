package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/check"
)

// TestUtilization runs the commands of the examples with a vllm that prints its arguments: the fraction of the card that it gets is that of the
// container's share, less what CUDA needs.
func TestUtilization(t *testing.T) {
	path := commands(t, map[string]string{"vllm": `printf '%s\n' "$@"`, "ray": "true"})
	type template struct{ Spec corev1.PodSpec }
	for file, leader := range map[string]string{"vllm.yaml": "", "leaderworkerset.yaml": "LWS_WORKER_INDEX=0"} {
		var object struct {
			Spec struct {
				Template             template
				LeaderWorkerTemplate struct{ WorkerTemplate template }
			}
		}
		check.Must(t, yaml.Unmarshal([]byte(read(t, "deploy/examples/"+file)), &object))
		container := append(object.Spec.Template.Spec.Containers, object.Spec.LeaderWorkerTemplate.WorkerTemplate.Spec.Containers...)[0]
		command := append(container.Command, container.Args...)
		for _, test := range []struct{ container, card, limit, want string }{
			{"8", "16", "", "0.475"},
			{"16", "16", "", "0.95"},
			{"8192", "16276", "", "0.478152"}, // MiB
			{"8", "80", "8192", "0.95"},       // In mode driver: the driver reports the limit as the card's memory.
			{"8", "80", "16384", "0.95"},      // A limit above the request.
		} {
			run := exec.CommandContext(t.Context(), command[0], command[1:]...)
			run.Env = append(os.Environ(), path, leader,
				"ALIYUN_COM_GPU_MEM_CONTAINER="+test.container, "ALIYUN_COM_GPU_MEM_DEV="+test.card, "NVIDIA_GPU_MEMORY_LIMIT="+test.limit)
			out, err := run.CombinedOutput()
			if want := "--gpu-memory-utilization\n" + test.want + "\n"; err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s, %s of %s, limit %q: %v, got %q, want %q", file, test.container, test.card, test.limit, err, out, want)
			}
		}
	}
}

// TestNotebookShare runs the command of the notebook with a torch that prints the fraction which it is limited to.
func TestNotebookShare(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip(err)
	}
	path := commands(t, map[string]string{"start-notebook.py": `exec python3 ~/.ipython/profile_default/startup/*.py`})
	torch := t.TempDir()
	const module = "class cuda:\n    set_per_process_memory_fraction = print\n"
	check.Must(t, os.WriteFile(filepath.Join(torch, "torch.py"), []byte(module), 0o600))
	var pod corev1.Pod
	check.Must(t, yaml.Unmarshal([]byte(read(t, "deploy/examples/notebook.yaml")), &pod))
	command := append(pod.Spec.Containers[0].Command, pod.Spec.Containers[0].Args...)
	for limit, want := range map[string]string{"": "0.25\n", "NVIDIA_GPU_MEMORY_LIMIT=4096": ""} {
		run := exec.CommandContext(t.Context(), command[0], command[1:]...)
		run.Env = append(os.Environ(), path, "HOME="+t.TempDir(), "PYTHONPATH="+torch, "PYTHONDONTWRITEBYTECODE=1", limit,
			"ALIYUN_COM_GPU_MEM_CONTAINER=4", "ALIYUN_COM_GPU_MEM_DEV=16")
		if out, err := run.CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("%q: %v, got %q, want %q", limit, err, out, want)
		}
	}
}

// commands returns a PATH in which these shell scripts come first.
func commands(t *testing.T, scripts map[string]string) string {
	t.Helper()
	directory := t.TempDir()
	for name, script := range scripts {
		check.Must(t, os.WriteFile(filepath.Join(directory, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	}
	return "PATH=" + directory + ":" + os.Getenv("PATH")
}
