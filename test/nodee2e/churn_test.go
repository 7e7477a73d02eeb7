package nodee2e

import (
	"fmt"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// longEnv selects the long forms of tests.
const longEnv = "GPUSHARE_TEST_LONG"

// inLong returns long in the long form of a test, and short otherwise.
func inLong(long, short int) int {
	if os.Getenv(longEnv) != "" {
		return long
	}
	return short
}

// TestChurn creates and deletes pods of all shapes in bursts of 8 to 40, of one size or of many sizes, and compares
// everything after each burst. It runs on equal cards and on cards of different sizes, with a quarter of the node free and
// on a full node.
func TestChurn(t *testing.T) {
	t.Parallel() // Its nodes run beside those of the other tests.
	for _, node := range []struct {
		title string
		cards []uint64
	}{
		{"equal cards", []uint64{cardMiB, cardMiB, cardMiB, cardMiB}},
		{"cards of different sizes", []uint64{cardMiB, 8138, 24268, cardMiB}},
	} {
		t.Run(node.title, func(t *testing.T) {
			r := startRig(t, node.cards...)
			defer r.report(t)
			r.play(t, "three quarters full", func(s *scene) { s.churnWithRoom(inLong(300, 75), s.total()*3/4) })
			r.play(t, "full", func(s *scene) { s.churnFull(inLong(200, 50)) })
		})
	}
}

// churnWithRoom creates the given number of pods in bursts and deletes older pods to make room. The requests of all pods
// together never exceed most.
func (s *scene) churnWithRoom(pods int, most int64) {
	s.Helper()
	// If a quarter of four cards is free, at least one card has room for the largest pod.
	const largest = 4
	for s.made < pods {
		size := 8 + s.random.Int64N(33)
		shape := s.shaped
		if s.random.IntN(2) == 0 {
			one := 1 + s.random.Int64N(min(largest, most/size))
			shape = func(int64) *corev1.Pod { return s.pod(one) }
		}
		var burst []*corev1.Pod
		var sum int64
		for range size {
			pod := shape(1 + s.random.Int64N(largest))
			if sum+memoryOf(pod) > most {
				s.made-- // This pod is not created.
				break
			}
			sum += memoryOf(pod)
			burst = append(burst, pod)
		}
		s.makeRoom(most - sum)
		if s.random.IntN(4) == 0 {
			// The kubelet doesn't hold such pods back until terminating pods are gone.
			s.gone(leaving)
			for _, pod := range burst {
				onNode(s.node.name)(pod)
			}
		}
		s.burst(burst...)
		if s.guessing {
			s.removeFailed(len(burst) / 2)
		}
		s.settle()
	}
}

// churnFull fills the node to the last unit. Then it replaces several pods at a time, until it has created the given number
// of pods. All pods have the same total request in different shapes, so each new pod fits where an old one was.
func (s *scene) churnFull(pods int) {
	s.Helper()
	const request = 3
	var fit int
	for _, card := range s.node.cards {
		fit += int(gibibytes(card) / request)
	}
	s.burst(times(fit, func() *corev1.Pod { return s.shaped(request) })...)
	s.bound()
	names := s.names()
	s.burst(times(int(s.total())-fit*request, func() *corev1.Pod { return s.pod(1) })...)
	s.settle()
	for s.made < pods {
		s.random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		leave := 8 + s.random.IntN(len(names)-8)
		s.delete(names[:leave]...)
		came := times(leave, func() *corev1.Pod { return s.shaped(request) })
		s.burst(came...)
		for i, pod := range came {
			names[i] = pod.Name
		}
		s.settle()
		if used := s.used(); used != s.total() {
			s.Errorf("the pods hold %d of the node's %d", used, s.total())
		}
	}
}

// total returns the memory of all the node's cards, in units.
func (s *scene) total() (sum int64) {
	for _, card := range s.node.cards {
		sum += gibibytes(card)
	}
	return sum
}

// leaving reports whether a pod is terminating.
func leaving(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil }

// used returns the requests of the scene's pods, without those that are terminating, in units.
func (s *scene) used() (sum int64) {
	s.Helper()
	pods, err := s.list(s.Context())
	must(s, err)
	for i := range pods {
		if !leaving(&pods[i]) && !terminal(&pods[i]) {
			sum += memoryOf(&pods[i])
		}
	}
	return sum
}

// makeRoom deletes random pods until the requests of the rest don't exceed most, in units.
func (s *scene) makeRoom(most int64) {
	s.Helper()
	pods, err := s.list(s.Context())
	must(s, err)
	s.random.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	used := s.used()
	for i := range pods {
		if used > most && !leaving(&pods[i]) {
			s.delete(pods[i].Name)
			used -= memoryOf(&pods[i])
		}
	}
}

// shaped returns a pod of random shape with this total request. Some of these pods ignore SIGTERM.
func (s *scene) shaped(total int64) *corev1.Pod {
	part := func(of int64) int64 { return 1 + s.random.Int64N(of) }
	var pod *corev1.Pod
	switch shape := s.random.IntN(8); {
	case shape == 0 && total >= 2:
		second := part(total - 1)
		pod = s.pod(total-second, with("second", second))
	case shape == 1 && total >= 3:
		second := part(total - 2)
		third := part(total - second - 1)
		pod = s.pod(total-second-third, with("second", second), with("third", third))
	case shape == 2: // The largest request decides.
		pod = s.pod(total, first("init", part(total)))
	case shape == 3:
		pod = s.pod(part(total), first("init", total))
	case shape == 4 && total >= 2:
		sidecar := part(total - 1)
		pod = s.pod(total-sidecar, beside("sidecar", sidecar))
	case shape == 5:
		pod = s.pod(total, with("plain", 0))
	default:
		pod = s.pod(total)
	}
	if memoryOf(pod) != total {
		panic(fmt.Sprintf("a pod for %d asks for %d", total, memoryOf(pod)))
	}
	if s.random.IntN(8) == 0 {
		stubborn(2)(pod)
	}
	return pod
}
