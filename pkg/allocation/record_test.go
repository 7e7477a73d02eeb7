package allocation

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func entry(uid gpu.PodUID, container string, card int, ids ...string) Entry {
	return Entry{ContainerKey{uid, container}, onCard(card, ids...)}
}

// cardsOf returns the cards of each container. The keys of lost allocations end in "lost".
func cardsOf(r *Record) map[string][]int {
	out := map[string][]int{}
	for uid, containers := range r.Snapshot() {
		for name, a := range containers {
			key := string(uid) + "/" + name
			if a.Lost {
				key += " lost"
			}
			out[key] = a.Cards.Cards()
		}
	}
	return out
}

// apiPods stubs the pods of the API server: it has every pod, or none, and their containers run with the ID instance.
type apiPods struct {
	none     bool
	instance string
}

func (p apiPods) Exists(gpu.PodUID) bool       { return !p.none }
func (p apiPods) Instance(ContainerKey) string { return p.instance }

func TestRecordSync(t *testing.T) {
	all, none := apiPods{}, apiPods{none: true}
	for name, test := range map[string]struct {
		before  func(*Record)
		entries []Entry
		// age is how long before start the checkpoint was written.
		age     time.Duration
		pods    apiPods
		want    map[string][]int
		changed []gpu.PodUID
	}{
		"the record is rebuilt from the checkpoint": {
			entries: []Entry{entry("a", "init", 1, "10"), entry("a", "main", 1, "10"), entry("b", "main", 0, "00")},
			want:    map[string][]int{"a/init": {1}, "a/main": {1}, "b/main": {0}}, changed: []gpu.PodUID{"a", "b"},
		},
		"an entry of a deleted pod is ignored": {
			entries: []Entry{entry("a", "main", 1, "10")}, pods: none, want: map[string][]int{},
		},
		"an allocation that isn't in the checkpoint yet stays": {
			before: func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			want:   map[string][]int{"a/main": {1}},
		},
		"the checkpoint agrees": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("a", "main", 1, "10")},
			want:    map[string][]int{"a/main": {1}},
		},
		"the checkpoint names another card": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("a", "main", 2, "10")},
			want:    map[string][]int{"a/main": {2}}, changed: []gpu.PodUID{"a"},
		},
		"the checkpoint names another set of cards": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCards([]int{0, 1}, "00", "10")) },
			entries: []Entry{{ContainerKey{"a", "main"}, onCards([]int{0, 2}, "00", "10")}},
			want:    map[string][]int{"a/main": {0, 2}}, changed: []gpu.PodUID{"a"},
		},
		"the checkpoint agrees on several cards": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCards([]int{0, 1}, "00", "10")) },
			entries: []Entry{{ContainerKey{"a", "main"}, onCards([]int{0, 1}, "10", "00")}},
			want:    map[string][]int{"a/main": {0, 1}},
		},
		"a running container keeps its cards, of which the checkpoint names only one": {
			before: func(r *Record) {
				r.Sync([]Entry{{ContainerKey{"a", "main"}, onCards([]int{0, 1}, "00", "10")}}, start, all)
			},
			entries: []Entry{entry("a", "main", 0, "00", "01")}, pods: apiPods{instance: "one"},
			want: map[string][]int{"a/main": {0, 1}},
		},
		"the checkpoint names another pod": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("b", "main", 1, "10")},
			want:    map[string][]int{"b/main": {1}}, changed: []gpu.PodUID{"a", "b"},
		},
		"a checkpoint that is older than the allocation names another pod": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("ended", "main", 0, "10")}, age: time.Second,
			want: map[string][]int{"a/main": {1}, "ended/main": {0}}, changed: []gpu.PodUID{"ended"},
		},
		"a checkpoint that is older than the allocation names another card": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("a", "main", 0, "00")}, age: time.Second,
			want: map[string][]int{"a/main": {1}},
		},
		"the checkpoint has lost an allocation": {
			before: func(r *Record) {
				r.Sync([]Entry{entry("a", "main", 1, "10")}, start, all)
				r.Add(ContainerKey{"b", "main"}, onCard(0, "00"))
			},
			want: map[string][]int{"a/main lost": {1}, "b/main": {0}},
		},
		"a new kubelet doesn't know an allocation that isn't in its checkpoint": {
			before: func(r *Record) { r.Add(ContainerKey{"b", "main"}, onCard(0, "00")); r.KubeletStarted() },
			want:   map[string][]int{"b/main lost": {0}},
		},
		"the checkpoint has lost an allocation of a deleted pod": {
			before: func(r *Record) { r.Sync([]Entry{entry("a", "main", 1, "10")}, start, all) },
			pods:   none, want: map[string][]int{},
		},
		"the checkpoint has a lost allocation again": {
			before: func(r *Record) {
				r.Add(ContainerKey{"a", "main"}, onCard(1, "10"))
				r.KubeletStarted()
				r.Sync(nil, start, all)
			},
			entries: []Entry{entry("a", "main", 1, "10")},
			want:    map[string][]int{"a/main": {1}},
		},
		"a kubelet that lost its checkpoint gives the devices of a running container to another pod": {
			before: func(r *Record) {
				r.Sync([]Entry{entry("a", "main", 1, "10")}, start, all)
				r.KubeletStarted()
				r.Sync(nil, time.Time{}, all)
			},
			entries: []Entry{entry("b", "main", 0, "10")},
			want:    map[string][]int{"a/main lost": {1}, "b/main": {0}}, changed: []gpu.PodUID{"b"},
		},
		"the checkpoint of a new kubelet names another pod": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")); r.KubeletStarted() },
			entries: []Entry{entry("b", "main", 1, "10")},
			want:    map[string][]int{"b/main": {1}}, changed: []gpu.PodUID{"a", "b"},
		},
		"the checkpoint names another card of a running container": {
			before: func(r *Record) {
				r.Sync([]Entry{entry("a", "main", 1, "10")}, start, all)
				r.KubeletStarted()
				r.Sync(nil, time.Time{}, all)
			},
			entries: []Entry{entry("a", "main", 0, "00")}, pods: apiPods{instance: "one"},
			want: map[string][]int{"a/main": {1}},
		},
		"the container has started again since": {
			before: func(r *Record) {
				r.Sync([]Entry{entry("a", "main", 1, "10")}, start, all)
				r.Sync([]Entry{entry("a", "main", 0, "00")}, start, apiPods{instance: "one"})
			},
			entries: []Entry{entry("a", "main", 0, "00")}, pods: apiPods{instance: "two"},
			want: map[string][]int{"a/main": {0}}, changed: []gpu.PodUID{"a"},
		},
		"the checkpoint names another card than was answered, and the container runs": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("a", "main", 0, "00")}, pods: apiPods{instance: "one"},
			want: map[string][]int{"a/main": {0}}, changed: []gpu.PodUID{"a"},
		},
		"the checkpoint names a pod that the API server doesn't have": {
			before:  func(r *Record) { r.Add(ContainerKey{"a", "main"}, onCard(1, "10")) },
			entries: []Entry{entry("unknown", "main", 1, "10")}, pods: none,
			want: map[string][]int{"unknown/main": {1}}, changed: []gpu.PodUID{"a", "unknown"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewRecord(nil)
			if test.before != nil {
				test.before(r)
			}
			changed := r.Sync(test.entries, start.Add(-test.age), test.pods)
			check.Equal(t, "record", test.want, cardsOf(r))
			check.Equal(t, "changed", test.changed, changed)
		})
	}
}

// The kubelet's checkpoint lists a deleted pod until the next allocation.
func TestRecordRemove(t *testing.T) {
	r := NewRecord(Allocations{"a": {"main": onCard(1, "10")}})
	r.Remove("a")
	r.Sync([]Entry{entry("a", "main", 1, "10")}, start, apiPods{none: true})
	if got := cardsOf(r); len(got) != 0 {
		t.Errorf("the record still has a deleted pod: %v", got)
	}
}

func TestRecordSnapshot(t *testing.T) {
	a := ContainerKey{"a", "main"}
	r := NewRecord(Allocations{"a": {"main": onCard(1, "10")}})
	pods, pod := r.Snapshot(), r.Pod("a")
	r.Add(a, onCard(0, "00"))
	r.Add(ContainerKey{"a", "second"}, onCard(1, "11"))
	r.Add(ContainerKey{"b", "main"}, onCard(1, "13"))
	r.Remove("a")
	want := PodAllocations{"main": onCard(1, "10")}
	check.Equal(t, "the snapshot changed", Allocations{"a": want}, pods)
	check.Equal(t, "the pod changed", want, pod)
	delete(pods, "a")
	r.Add(a, onCard(1, "10"))
	check.Equal(t, "a caller changed the record", map[string][]int{"a/main": {1}, "b/main": {1}}, cardsOf(r))
}
