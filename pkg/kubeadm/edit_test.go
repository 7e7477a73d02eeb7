package kubeadm

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the golden files")

const installed = "/etc/kubernetes/gpushare/scheduler-config-0123456789ab.yaml"

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestEdit(t *testing.T) {
	for _, name := range []string{"kubeadm", "by-hand", "bare"} {
		t.Run(name, func(t *testing.T) {
			before := read(t, filepath.Join("testdata", name+".yaml"))
			got, err := Edit(before, installed)
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(string(read(t, golden)), string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if again, err := Edit(got, installed); err != nil || string(again) != string(got) {
				t.Errorf("edited again it is another: %v\n%s", err, cmp.Diff(string(got), string(again)))
			}
			onlyAdds(t, before, got)
		})
	}
}

// onlyAdds compares what the kubelet will read: nothing but --config, a mount and a volume may differ.
func onlyAdds(t *testing.T, before, after []byte) {
	t.Helper()
	var was, is corev1.Pod
	for data, pod := range map[*corev1.Pod][]byte{&was: before, &is: after} {
		if err := yaml.UnmarshalStrict(pod, data); err != nil {
			t.Fatal(err)
		}
	}
	strip := func(p *corev1.Pod) {
		for i := range p.Spec.Containers {
			c := &p.Spec.Containers[i]
			c.Command, c.Args = without(c.Command), without(c.Args)
			var mounts []corev1.VolumeMount
			for _, m := range c.VolumeMounts {
				if m.Name != volume {
					mounts = append(mounts, m)
				}
			}
			c.VolumeMounts = mounts
		}
		var volumes []corev1.Volume
		for _, v := range p.Spec.Volumes {
			if v.Name != volume {
				volumes = append(volumes, v)
			}
		}
		p.Spec.Volumes = volumes
	}
	strip(&was)
	strip(&is)
	if diff := cmp.Diff(was, is); diff != "" {
		t.Errorf("something else has changed (-was +is):\n%s", diff)
	}
}

func without(words []string) []string {
	var out []string
	for i := 0; i < len(words); i++ {
		switch {
		case words[i] == "--config":
			i++
		case !strings.HasPrefix(words[i], "--config="):
			out = append(out, words[i])
		}
	}
	return out
}

func TestStaticPodsThatCannotBeEdited(t *testing.T) {
	for name, test := range map[string]struct{ manifest, want string }{
		"no YAML":            {"{{{", "reading the static pod"},
		"empty":              {"", "reading the static pod"},
		"no pod":             {"kind: Service\n", "no Pod"},
		"another program":    {"kind: Pod\nspec: {containers: [{command: [kube-apiserver]}]}\n", "no container of the static pod runs kube-scheduler"},
		"two objects":        {"kind: Pod\n---\nkind: Pod\n", "more than one object"},
		"a policy, from old": {"kind: Pod\nspec: {containers: [{command: [kube-scheduler, --policy-config-file=/x]}]}\n", "--policy-config-file"},
	} {
		if _, err := Edit([]byte(test.manifest), installed); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}

func TestMerge(t *testing.T) {
	ours := read(t, "../../config/scheduler-config.yaml")
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	tests := map[string]struct {
		theirs, kubeconfig string
		// want are lines that must be there, lost ones that must not.
		want, lost []string
		err        string
	}{
		"nothing before": {want: []string{"# Configuration of kube-scheduler", "kubeconfig: /etc/kubernetes/scheduler.conf"}},
		"nothing before, but another kubeconfig": {
			kubeconfig: "/srv/scheduler.conf", want: []string{"kubeconfig: /srv/scheduler.conf", "bindVerb: bind"},
			lost: []string{"/etc/kubernetes/scheduler.conf"},
		},
		"profiles and an extender that doesn't bind are kept": {
			theirs: head + "profiles: [{schedulerName: mine}]\nextenders: [{urlPrefix: http://theirs, filterVerb: f}]\nclientConnection: {kubeconfig: /k}\n",
			want:   []string{"schedulerName: mine", "urlPrefix: http://theirs", "urlPrefix: http://127.0.0.1:12345/gpushare-scheduler", "kubeconfig: /k", "percentageOfNodesToScore: 100"},
		},
		"their share of nodes is kept": {theirs: head + "percentageOfNodesToScore: 7\n", want: []string{"percentageOfNodesToScore: 7", "podMaxBackoffSeconds: 5"}},
		"and their back-off":           {theirs: head + "podMaxBackoffSeconds: 7\n", want: []string{"percentageOfNodesToScore: 100", "podMaxBackoffSeconds: 7"}},
		"another gpushare's extender is replaced": {
			theirs: head + "extenders: [{urlPrefix: http://old, bindVerb: bind, managedResources: [{name: aliyun.com/gpu-mem}]}]\n",
			want:   []string{"urlPrefix: http://127.0.0.1:12345/gpushare-scheduler"}, lost: []string{"http://old"},
		},
		"another binder":  {theirs: head + "extenders: [{urlPrefix: http://other, bindVerb: bind}]\n", err: "names an extender that binds, http://other; only one may"},
		"another version": {theirs: strings.Replace(head, "/v1\n", "/v1beta3\n", 1), err: "give both one version"},
		"another kind":    {theirs: "kind: Policy\napiVersion: v1\n", err: "the configuration that kube-scheduler has: it is no KubeSchedulerConfiguration"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var theirs []byte
			if test.theirs != "" {
				theirs = []byte(test.theirs)
			}
			got, err := Merge(theirs, ours, test.kubeconfig)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("got %v, want %q", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range test.want {
				if !strings.Contains(string(got), line) {
					t.Errorf("no %q in\n%s", line, got)
				}
			}
			for _, line := range test.lost {
				if strings.Contains(string(got), line) {
					t.Errorf("%q is left in\n%s", line, got)
				}
			}
			if again, err := Merge(got, ours, test.kubeconfig); err != nil || strings.Count(string(again), "gpushare-scheduler") != 1 {
				t.Errorf("merged again: %v\n%s", err, again)
			}
		})
	}
	if _, err := Merge(nil, []byte(head), ""); err == nil || !strings.Contains(err.Error(), "must have one extender") {
		t.Errorf("a configuration without our extender: %v", err)
	}
}
