package inspect

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

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

// Group is a group of pods.
type Group struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Size is the number of members that must be bound together, 0 if unknown.
	Size int `json:"size"`
	// Members is the number of pods that ask for cards and haven't ended, Bound the number of those with a node.
	Members int `json:"members"`
	Bound   int `json:"bound"`
	// Cardless is the number of pods that ask for no cards. They don't count as members.
	Cardless int    `json:"cardless"`
	State    string `json:"state"`
	// Reason is why the group is not bound: kube-scheduler's message about a pod, or what is wrong with the group.
	Reason string `json:"reason"`
}

// The states of a group.
const (
	GroupInvalid    = "Invalid"    // The name or size is invalid.
	GroupIncomplete = "Incomplete" // Not all members exist.
	GroupWaiting    = "Waiting"
	GroupPartial    = "Partial" // Some members are bound: the group is being bound, or has lost a member.
	GroupBound      = "Bound"
	GroupEnded      = "Ended"
)

// readGroupPods reads the pods of a namespace, or of all namespaces if it is empty, that belong to groups.
func readGroupPods(ctx context.Context, client kubernetes.Interface, namespace string) (pods []*corev1.Pod, err error) {
	err = each(ctx, "pods", client.CoreV1().Pods(namespace).List, metav1.ListOptions{}, func(pod *corev1.Pod) {
		if protocol.InGroup(pod) {
			pod.ManagedFields = nil
			pods = append(pods, pod)
		}
	})
	return pods, err
}

// BuildGroups returns the groups of the pods.
func BuildGroups(pods []*corev1.Pod) Groups {
	found := map[[2]string]*groupPods{}
	for _, pod := range pods {
		group, err := protocol.GroupOf(pod)
		key := [2]string{pod.Namespace, group.Name}
		if found[key] == nil {
			found[key] = &groupPods{Group: Group{Namespace: pod.Namespace, Name: group.Name}}
		}
		found[key].add(pod, group, err)
	}
	out := Groups{APIVersion: ReportAPIVersion, Kind: GroupsKind, Groups: []Group{}}
	for _, group := range found {
		out.Groups = append(out.Groups, group.judge())
	}
	slices.SortFunc(out.Groups, func(a, b Group) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// groupPods collects the pods of a group.
type groupPods struct {
	Group
	problem string
	// ended is the number of members that have ended, waits kube-scheduler's message about a pending one.
	ended, succeeded int
	waits            string
}

func (g *groupPods) add(pod *corev1.Pod, group protocol.Group, err error) {
	switch {
	case pod.Status.Phase == corev1.PodSucceeded:
		g.ended, g.succeeded = g.ended+1, g.succeeded+1
		return
	case protocol.Terminal(pod):
		g.ended++
		return
	case pod.DeletionTimestamp != nil:
		return
	case err != nil:
		g.problem = err.Error()
		return
	case g.Size != 0 && g.Size != group.Size:
		g.problem = "the members disagree on the group's size"
	}
	g.Size = max(g.Size, group.Size)
	switch {
	case !protocol.RequestsCards(pod):
		g.Cardless++
	case pod.Spec.NodeName != "":
		g.Members, g.Bound = g.Members+1, g.Bound+1
	default:
		g.Members++
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Message != "" {
				g.waits = condition.Message
			}
		}
	}
}

func (g *groupPods) judge() Group {
	out := g.Group
	switch {
	case g.problem != "":
		out.State, out.Reason = GroupInvalid, g.problem
	case g.Members == 0 && g.ended > 0:
		out.State = GroupEnded
	case g.Bound == g.Members && g.Bound+g.succeeded >= g.Size:
		out.State = GroupBound
	case g.Bound > 0:
		out.State, out.Reason = GroupPartial, g.waits
	case g.Members+g.succeeded < g.Size:
		out.State, out.Reason = GroupIncomplete, fmt.Sprintf("%d of %d members exist", g.Members, g.Size)
		if g.Members+g.Cardless >= g.Size {
			out.Reason += fmt.Sprintf(", and %d that ask for no cards don't count", g.Cardless)
		}
	default:
		out.State, out.Reason = GroupWaiting, g.waits
	}
	return out
}

// writeGroups writes a row for each group.
func writeGroups(out *bytes.Buffer, groups Groups, f format) {
	table := rows{{bold, []string{"NAMESPACE", "GROUP", "SIZE", "MEMBERS", "BOUND", "STATE", "REASON"}}}
	for _, g := range groups.Groups {
		size := "?"
		if g.Size > 0 {
			size = strconv.Itoa(g.Size)
		}
		table.add(plain, g.Namespace, cmp.Or(shorten(g.Name), "<unnamed>"), size, strconv.Itoa(g.Members), strconv.Itoa(g.Bound),
			g.State, cmp.Or(g.Reason, "-"))
	}
	table.writeAlone(out, f)
}
