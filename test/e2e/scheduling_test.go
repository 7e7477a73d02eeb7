package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// What kube-scheduler and the extender do together, on nodes that nothing needs to run on.
func TestScheduling(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})

	play(t, bed, "filter: of three nodes the one with 8138 on a single card is taken", func(s *scene) {
		s.addNodes(
			controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)},
			controlplane.Node{Name: "n2", Cards: mebibytes(cardMiB, cardMiB)},
			controlplane.Node{Name: "n3", Cards: mebibytes(cardMiB, cardMiB)},
		)
		s.fill(s.at("n1"), 16276, 12207) // 4069 left in all
		s.fill(s.at("n2"), 12207, 12207) // 4069 left on each card
		s.fill(s.at("n3"), 8138, 16276)  // 8138 left on card 0
		fragmented := s.metric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`)

		s.sits(s.place("asks-8138", 8138), s.at("n3"), 0)

		if got := s.metric(`gpushare_extender_filtered_nodes_total{reason="fragmented"}`); got != fragmented+1 {
			s.Errorf("the extender refused %v nodes as fragmented, want n2 alone: n1 fails the scheduler's own sum", got-fragmented)
		}
		// n2 has 8138 left in all, so it is the extender that refuses it.
		s.create("pinned-to-n2", 8138, on(s.at("n2")))
		s.refused("pinned-to-n2", "1 no GPU card has enough free memory")
		s.create("pinned-to-n1", 8138, on(s.at("n1")))
		s.refused("pinned-to-n1", "1 Insufficient "+string(protocol.ResourceMemory))
	})

	play(t, bed, "bind: of 12207, 8138, 4069 and 16276 free, 8138 goes to the card with 8138", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB, cardMiB, cardMiB)})
		// Binpack fills one card after the other; every second of these pods then leaves again.
		s.fill(n1, 12207, 4069, 8138, 8138, 4069, 12207, 16276)
		s.remove("n1-0", "n1-3", "n1-4", "n1-6")
		s.wantFree(n1, 12207, 8138, 4069, 16276)

		pod := s.place("asks-8138", 8138)
		s.sits(pod, n1, 1)
		assignment, err := protocol.ParseAssignment(pod.Annotations)
		must(s, err)
		if assignment.Request != 8138 || assignment.CardMemory != cardMiB || assignment.Assigned || assignment.AssumeTime.Before(pod.CreationTimestamp.Time) {
			s.Errorf("the annotations are %v", pod.Annotations)
		}
		s.event("asks-8138", "GPUCardAssumed", "card 1 of node "+n1, "8138 MiB of its 16276 MiB")
	})

	play(t, bed, "cards of different sizes are each used up to their own", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(8192, 40960)})
		s.sits(s.place("large", 30000), n1, 1)
		s.sits(s.place("small", 8192), n1, 0)
		s.sits(s.place("rest", 10960), n1, 1)
		s.create("over", 1)
		s.refused("over", "Insufficient "+string(protocol.ResourceMemory))
	})

	play(t, bed, "no room anywhere: the pod waits, is told why, and gets the place of one that ends", func(s *scene) {
		s.addNodes(
			controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)},
			controlplane.Node{Name: "n2", Cards: mebibytes(8137)},
		)
		s.fill(s.at("n1"), 12207, 12207)
		s.create("waits", 8138)
		reason := s.event("waits", "FailedScheduling")
		if !containsAll(reason, []string{"1 no GPU card has enough free memory", "1 Insufficient " + string(protocol.ResourceMemory)}) {
			s.Errorf("the event says %q", reason)
		}
		must(s, s.delete("n1-1", 0))
		s.sits(s.bound("waits"), s.at("n1"), 1)
	})

	play(t, bed, "a pod that ends by itself gives its place to the next", func(s *scene) {
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, 4069)})
		for i, phase := range []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed} {
			name := fmt.Sprintf("ends-%d", i)
			s.place(name, cardMiB)
			next := fmt.Sprintf("next-%d", i)
			s.create(next, 12207)
			s.refused(next, "Insufficient")
			s.end(name, phase)
			s.sits(s.bound(next), s.at("n1"), 0)
			s.remove(next)
		}
	})

	play(t, bed, "a pod in its grace period holds its memory", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
		s.fill(n1, 12207, 12207)
		must(s, s.delete("n1-0", 300))
		// The watch tells in order: when the extender knows of this pod, it knows of the deletion too.
		s.place("marker", 1)
		s.checkBooks()
		s.create("waits", 8000)
		s.refused("waits", "1 no GPU card has enough free memory")
		if reason := s.ask("waits", n1); reason != "no GPU card has enough free memory, though the node's cards together have" {
			s.Errorf("asked again, the extender says %q", reason)
		}
		must(s, s.delete("n1-0", 0))
		s.sits(s.bound("waits"), n1, 0)
	})

	play(t, bed, "a pod that no card of the cluster can ever hold is told so", func(s *scene) {
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
		s.create("too-large", cardMiB+1)
		s.refused("too-large", "1 the pod asks for more GPU memory than any card of the node has")
	})

	play(t, bed, "a node that offers nvidia.com/gpu beside gpu-mem is refused, and says so", func(s *scene) {
		s.addNodes(controlplane.Node{
			Name: "n1", Cards: mebibytes(cardMiB),
			Capacity: corev1.ResourceList{protocol.ResourceWholeCard: resource.MustParse("1")},
		})
		s.create("waits", 1024)
		s.refused("waits", "1 the node offers nvidia.com/gpu and aliyun.com/gpu-mem at once, which exclude each other")
		// Beside it, a node that shares alone is taken.
		s.addNodes(controlplane.Node{Name: "n2", Cards: mebibytes(cardMiB)})
		s.sits(s.bound("waits"), s.at("n2"), 0)
	})

	play(t, bed, "forged annotations gain nothing", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
		s.sits(s.place("honest", 12207), n1, 0)
		forged := func(index, request, assigned string) edit {
			return annotated(map[string]string{
				protocol.AnnotationIndex: index, protocol.AnnotationPod: request, protocol.AnnotationDevice: "999999",
				protocol.AnnotationAssumeTime: "1", protocol.AnnotationAssigned: assigned,
				protocol.AnnotationAllocation: `{"main":{"0":1}}`,
			})
		}
		// Card 0 has 4069 left: each of these sits on card 1, with all that it asks for.
		for name, edit := range map[string]edit{
			"index-of-a-full-card": forged("0", "5000", "false"),
			"tiny-request":         forged("0", "1", "false"),
			"huge-request":         forged("0", "9223372036854775807", "true"),
		} {
			pod := s.place(name, 5000, edit)
			s.sits(pod, n1, 1)
			assignment, err := protocol.ParseAssignment(pod.Annotations)
			must(s, err)
			if assignment.Request != 5000 || assignment.CardMemory != cardMiB || assignment.Assigned || assignment.AssumeTime.Before(pod.CreationTimestamp.Time) {
				s.Errorf("the forged annotations of %s became %v", name, pod.Annotations)
			}
		}
		s.create("one-more", 5000, forged("0", "1", "true"))
		s.refused("one-more", "1 no GPU card has enough free memory")
		s.checkBooks()
		// What a bound pod's annotations are made to say later counts no more than what they said at first.
		s.annotate("tiny-request", map[string]string{protocol.AnnotationPod: "1"})
		s.annotate("huge-request", map[string]string{protocol.AnnotationPod: "99999999", protocol.AnnotationDevice: "1"})
		s.create("two-more", 5000)
		s.refused("two-more", "1 no GPU card has enough free memory")
	})

	play(t, bed, "a node of an existing plugin is read as equal cards", func(s *scene) {
		n1 := s.at("n1")
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB, cardMiB), WithoutInventory: true})
		for i := range 3 {
			s.sits(s.place(fmt.Sprintf("pod-%d", i), 12207), n1, i)
		}
		s.create("waits", 12207)
		s.refused("waits", "1 no GPU card has enough free memory")
		s.sits(s.place("fits", 4069), n1, 0)
		if got := s.get("fits").Annotations[protocol.AnnotationDevice]; got != fmt.Sprint(cardMiB) {
			s.Errorf("the card's total is %q, want %d", got, cardMiB)
		}
	})

	play(t, bed, "a pod is counted with its init containers and sidecars", func(s *scene) {
		s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB)})
		pod := s.place("many", 1000, with("second", 2000), beside("sidecar", 500), first("init", 8000))
		if got := pod.Annotations[protocol.AnnotationPod]; got != "8500" {
			s.Errorf("the pod's request is %q, want 8500: its init container beside its sidecar", got)
		}
	})

	play(t, bed, "kubectl inspect gpushare, the extender and the API server agree", inspectAgrees)
}

// inspectAgrees compares what `kubectl inspect gpushare` prints.
func inspectAgrees(s *scene) {
	n1, n2 := s.at("n1"), s.at("n2")
	s.addNodes(
		controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)},
		controlplane.Node{Name: "n2", Cards: mebibytes(8138), WithoutInventory: true},
	)
	s.fill(n1, 12207, 10000, 2207)
	s.fill(n2, 1024)
	s.create("waits", 8138)
	s.refused("waits", "no GPU card has enough free memory")
	s.checkBooks()

	kubectl := func(args ...string) string {
		s.Helper()
		return s.kubectlInspect(append(args, "--kubeconfig="+s.bed.KubeconfigPath)...)
	}
	var report struct {
		Nodes []struct {
			Name  string
			Cards []struct {
				Index            int
				Allocated, Total int64
			}
			Pods []struct {
				Namespace, Name string
				Shares          []struct {
					Card   int
					Memory int64
				}
			}
		}
		PendingPods []struct{ Name, Reason string }
	}
	must(s, json.Unmarshal([]byte(kubectl("-o", "json")), &report))
	got := books{}
	for _, node := range report.Nodes {
		got[node.Name] = map[int]page{}
		for _, card := range node.Cards {
			got[node.Name][card.Index] = page{Total: card.Total, Used: card.Allocated}
		}
		for _, pod := range node.Pods {
			for _, share := range pod.Shares {
				card := got[node.Name][share.Card]
				card.Pods = append(card.Pods, entry(pod.Namespace, pod.Name, share.Memory))
				slices.Sort(card.Pods)
				got[node.Name][share.Card] = card
			}
		}
	}
	want, err := inspected(s.Context(), s.bed)
	must(s, err)
	s.sameBooks("the extender", want, "kubectl inspect gpushare -o json", got)
	if len(report.PendingPods) != 1 || report.PendingPods[0].Name != "waits" ||
		!strings.Contains(report.PendingPods[0].Reason, "no GPU card has enough free memory") {
		s.Errorf("pending pods: %+v", report.PendingPods)
	}

	rows := map[string][]string{}
	for line := range strings.Lines(kubectl("--no-headers")) {
		if fields := strings.Fields(line); len(fields) > 0 {
			rows[fields[0]] = fields[2:]
		}
	}
	if got, want := rows[n1], []string{"14414/16276", "10000/16276", "24414/32552"}; !slices.Equal(got, want) {
		s.Errorf("the table's row of n1 is %v, want %v", got, want)
	}
	if got, want := rows[n2], []string{"1024/8138", "0/0", "1024/8138"}; !slices.Equal(got, want) {
		s.Errorf("the table's row of n2 is %v, want %v", got, want)
	}
	if table := kubectl("-d", n1); !containsAll(table, []string{"n1-0", "n1-1", "n1-2", "24414 (75%)"}) {
		s.Errorf("the details of n1 are\n%s", table)
	}
}

// ask asks the extender's filter about one pod and node, and returns its reason, empty where the node passes.
func (s *scene) ask(pod, node string) string {
	s.Helper()
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: s.get(pod), NodeNames: &[]string{node}})
	must(s, err)
	request, err := http.NewRequestWithContext(s.Context(), http.MethodPost, s.bed.ExtenderURL+"/gpushare-scheduler/filter", bytes.NewReader(body))
	must(s, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	must(s, err)
	defer response.Body.Close()
	var answer extenderv1.ExtenderFilterResult
	must(s, json.NewDecoder(response.Body).Decode(&answer))
	switch {
	case answer.Error != "":
		s.Fatalf("filter answers with an error: %s", answer.Error)
	case answer.NodeNames != nil && slices.Contains(*answer.NodeNames, node):
		return ""
	case answer.FailedNodes[node] != "":
		return answer.FailedNodes[node]
	}
	return answer.FailedAndUnresolvableNodes[node]
}

// wantFree checks what is left on each card of a node, in order.
func (s *scene) wantFree(node string, want ...int64) {
	s.Helper()
	b, err := inspected(s.Context(), s.bed)
	must(s, err)
	free := make([]int64, len(b[node]))
	for i, card := range b[node] {
		free[i] = card.Total - card.Used
	}
	if !slices.Equal(free, want) {
		s.Fatalf("node %s has %v free, want %v", node, free, want)
	}
}

// metric returns a counter that the extender exposes, by its name and labels. One that hasn't counted yet is 0.
func (s *scene) metric(name string) float64 {
	s.Helper()
	body, err := framework.Fetch(s.Context(), s.bed.ExtenderURL+"/metrics")
	must(s, err)
	for line := range strings.Lines(string(body)) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			var value float64
			_, err := fmt.Sscan(rest, &value)
			must(s, err)
			return value
		}
	}
	return 0
}

// awaitMetric waits until a counter has come to a value.
func (s *scene) awaitMetric(name string, want float64) {
	s.Helper()
	eventually(s, fmt.Sprintf("%s is at least %v", name, want), func(context.Context) error {
		if got := s.metric(name); got < want {
			return fmt.Errorf("it is %v", got)
		}
		return nil
	})
}

func (s *scene) sameBooks(wantName string, want books, gotName string, got books) {
	s.Helper()
	if diff := want.diff(got); diff != "" {
		s.Errorf("-%s +%s:\n%s", wantName, gotName, diff)
	}
}

// end writes a pod's last phase, as its kubelet would.
func (s *scene) end(name string, phase corev1.PodPhase) {
	s.Helper()
	s.patch(name, map[string]any{"status": map[string]any{"phase": phase}}, "status")
}

func (s *scene) annotate(name string, annotations map[string]string) {
	s.Helper()
	s.patch(name, map[string]any{"metadata": map[string]any{"annotations": annotations}})
}
