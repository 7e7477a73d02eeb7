package inspect

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// GroupsKind is the kind of the JSON and YAML output of --groups. Its apiVersion is ReportAPIVersion.
const GroupsKind = "GPUShareGroups"

// Groups is the list of all groups of pods.
type Groups struct {
	APIVersion string  `json:"apiVersion"`
	Kind       string  `json:"kind"`
	Groups     []Group `json:"groups"`
}

// Group is a group of pods, or one run of it if several exist: the members of an earlier run can still be running while the
// next run waits.
type Group struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Native is true for the pods of a PodGroup of Kubernetes.
	Native bool `json:"native,omitempty"`
	// Pods are the names of the pods if the group has no name. Those of a namespace are one group.
	Pods []string `json:"pods,omitempty"`
	// Run identifies the run; empty if no member is bound, or if no bound member has the annotation
	// gpushare.aliyun.com/group-run.
	Run string `json:"run,omitempty"`
	// Size is the number of members that must be bound together, 0 if unknown.
	Size int `json:"size"`
	// Members is the number of pods that ask for cards and haven't ended, Bound the number of those with a node.
	Members int `json:"members"`
	Bound   int `json:"bound"`
	// Cardless is the number of pods that ask for no cards. They don't count as members.
	Cardless int    `json:"cardless"`
	State    string `json:"state"`
	// Since is since when the members wait: the creation time of the last one that the group needs, or of the oldest one if
	// others are missing. It is left out if none waits.
	Since *time.Time `json:"since,omitempty"`
	// Reason is why members are pending: the extender's reason, kube-scheduler's message, or what is wrong with the group.
	Reason string `json:"reason"`
}

// The states of a group. All but the first and the last are phases of package gang. The others of its phases are known to
// the extender alone: Pending includes planned and permitting, Broken includes binding and evicting.
const (
	GroupInvalid    = "Invalid"    // The name or size is invalid.
	GroupIncomplete = "Incomplete" // Too few members exist.
	GroupPending    = "Pending"    // Enough members exist, and none is bound.
	GroupRunning    = "Running"    // All members have been bound.
	GroupBroken     = "Broken"     // Some members are bound, others are not.
	GroupEnded      = "Ended"      // No member runs or waits.
)

// readGroupPods reads the pods of a namespace, or of all namespaces if it is empty, that belong to groups, and the PodGroups if any
// of the pods names one. These are nil if the API server has none.
func readGroupPods(ctx context.Context, client kubernetes.Interface, namespace string) (pods []*corev1.Pod, podGroups map[gang.Key]gang.PodGroup, err error) {
	native := false
	err = each(ctx, "pods", client.CoreV1().Pods(namespace).List, metav1.ListOptions{}, func(pod *corev1.Pod) {
		if protocol.InGroup(pod) || protocol.PodGroupName(pod) != "" {
			pod.ManagedFields = nil
			pods, native = append(pods, pod), native || protocol.PodGroupName(pod) != ""
		}
	})
	if err != nil || !native {
		return pods, nil, err
	}
	podGroups, err = readPodGroups(ctx, client, namespace)
	return pods, podGroups, err
}

// readPodGroups reads the PodGroups of a namespace, or of all namespaces if it is empty. They are nil if the API server has none.
func readPodGroups(ctx context.Context, client kubernetes.Interface, namespace string) (map[gang.Key]gang.PodGroup, error) {
	podGroups := map[gang.Key]gang.PodGroup{}
	err := each(ctx, "podgroups", client.SchedulingV1beta1().PodGroups(namespace).List, metav1.ListOptions{}, func(group *schedulingv1beta1.PodGroup) {
		key, podGroup := clustercache.PodGroupOf(group)
		podGroups[key] = podGroup
	})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return podGroups, err
}

// BuildGroups returns the groups of the pods. podGroups is nil if native groups don't count. now is the time for which they are
// reported.
func BuildGroups(pods []*corev1.Pod, podGroups map[gang.Key]gang.PodGroup, now time.Time) Groups {
	out := Groups{APIVersion: ReportAPIVersion, Kind: GroupsKind, Groups: []Group{}}
	groups := newGroupState(pods, podGroups, now)
	for _, run := range groups.runs() {
		state, reason := groups.of(&run)
		group := Group{
			Namespace: run.Group.Namespace, Name: run.Group.Name, Native: run.Group.Native, Run: run.ID, Size: run.Size, Bound: len(run.Bound),
			Members: len(run.Bound) + len(run.Pending), Cardless: groups.cardless[run.Group], State: state, Reason: reason,
		}
		if group.Name == "" {
			group.Pods = slices.Sorted(slices.Values(slices.Concat(run.Bound, run.Pending)))
		}
		if since := run.WaitsSince; !since.IsZero() {
			group.Since = &since
		}
		out.Groups = append(out.Groups, group)
	}
	return out
}

// writeGroups writes a row for each group.
func writeGroups(out *bytes.Buffer, groups Groups, f format) {
	table := rows{{bold, []string{"NAMESPACE", "GROUP", "SIZE", "MEMBERS", "BOUND", "STATE", "WAITS SINCE", "REASON"}}}
	for _, g := range groups.Groups {
		size := "?"
		if g.Size > 0 {
			size = strconv.Itoa(g.Size)
		}
		since := "-"
		if g.Since != nil {
			since = g.Since.UTC().Format(time.RFC3339)
		}
		name := cmp.Or(shorten(g.Name), "<unnamed> "+diagnosis.FirstOf(g.Pods))
		if g.Native {
			name = "podgroup/" + name
		}
		table.add(plain, g.Namespace, name, size, strconv.Itoa(g.Members), strconv.Itoa(g.Bound),
			g.State, since, cmp.Or(shorten(g.Reason), "-"))
	}
	table.writeAlone(out, f)
}
