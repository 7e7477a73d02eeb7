package neighbours

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpushare/gpushare/test/framework"
)

// TestJobSet: the two replicated jobs of a JobSet are one group, or each job is one. After a failure JobSet creates all jobs again, and they start
// whole.
func TestJobSet(t *testing.T) {
	w := startWorkloads(t, "jobset", "config.jobset.x-k8s.io/v1alpha1")
	job := func(name string, replicas, pods int, member *framework.PodWrapper) map[string]any {
		member.Spec.RestartPolicy = corev1.RestartPolicyNever
		return map[string]any{"name": name, "replicas": replicas, "template": map[string]any{"spec": map[string]any{
			"backoffLimit": 0, "parallelism": pods, "completions": pods, "template": podTemplate(member),
		}}}
	}
	create := func(s *workloadScene, jobs ...map[string]any) {
		s.Helper()
		s.create(schema.GroupVersionResource{Group: "jobset.x-k8s.io", Version: "v1alpha2", Resource: "jobsets"}, "JobSet", map[string]any{
			"failurePolicy": map[string]any{"maxRestarts": 3}, "replicatedJobs": jobs,
		})
	}
	fail := func(s *workloadScene, pod corev1.Pod) {
		s.Helper()
		s.Patch(pod.Name, map[string]any{"status": map[string]any{"phase": corev1.PodFailed}}, "status")
	}

	t.Run("one group", func(t *testing.T) {
		s := w.scene(t, 4, "jobset.sigs.k8s.io/replicatedjob-name")
		s.Place(s.Pod("single", 16))
		create(s, job("driver", 1, 1, s.member(4)), job("workers", 1, 3, s.member(4)))
		s.waitRejected(4)
		s.Delete("single")
		all := map[string]int{"driver": 1, "workers": 3}
		pods := s.waitBound(all)
		must(s.T, s.SetRunning(s.Context(), pods...))
		fail(s, s.of(pods, "workers")[1])
		s.waitReplaced(pods, all)
	})

	// The driver runs on: it is the only one of four members that runs while the other job is created again.
	t.Run("one job of a group is created again", func(t *testing.T) {
		s := w.scene(t, 4, "jobset.sigs.k8s.io/replicatedjob-name")
		create(s, job("driver", 1, 1, s.member(4)), job("workers", 1, 3, s.member(4)))
		all := map[string]int{"driver": 1, "workers": 3}
		pods := s.waitBound(all)
		must(t, s.SetRunning(t.Context(), pods...))
		must(t, w.Client.BatchV1().Jobs(s.ID).Delete(t.Context(), "set-workers-0", metav1.DeleteOptions{
			PropagationPolicy: new(metav1.DeletePropagationBackground),
		}))
		s.waitReplaced(s.of(pods, "workers"), all)
	})

	// Five cards hold two of the three jobs, which wait for no other.
	t.Run("groups by job", func(t *testing.T) {
		s := w.scene(t, 5, "jobset.sigs.k8s.io/job-key")
		create(s, job("workers", 3, 2, s.member(2).Annotation("gpushare.aliyun.com/group-name-label", "jobset.sigs.k8s.io/job-key")))
		pods := s.waitWhole(2, 2)
		s.addCards("others", 1)
		must(s.T, s.SetRunning(s.Context(), pods...))
		s.waitWhole(3, 2)
	})
}
