package deviceplugin

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
)

var start = time.Unix(1_700_000_000, 0)

func books(t *testing.T, entries ...entry) []booking {
	t.Helper()
	bookings, err := parseCheckpoint(checkpointData(t, entries...))
	if err != nil {
		t.Fatal(err)
	}
	return bookings
}

// cardsOf returns the card of each container. The keys of lost servings end in "lost".
func cardsOf(r *record) map[string]int {
	out := map[string]int{}
	for uid, containers := range r.Snapshot() {
		for name, s := range containers {
			key := string(uid) + "/" + name
			if s.Lost {
				key += " lost"
			}
			out[key] = s.Card
		}
	}
	return out
}

func given(card int, ids ...string) serving {
	return serving{Card: card, CardMemory: 16, Request: gpu.Memory(len(ids)), Devices: newDeviceSet(ids), At: start}
}

// apiPods stubs the pods of the API server: it has every pod, or none, and their containers run with the ID instance.
type apiPods struct {
	none     bool
	instance string
}

func (p apiPods) Exists(gpu.PodUID) bool       { return !p.none }
func (p apiPods) Instance(containerKey) string { return p.instance }

func TestRecordSync(t *testing.T) {
	all, none := apiPods{}, apiPods{none: true}
	for name, test := range map[string]struct {
		before func(*record)
		books  []entry
		// age is how long before start the checkpoint was written.
		age     time.Duration
		pods    apiPods
		want    map[string]int
		changed []gpu.PodUID
	}{
		"is rebuilt from the checkpoint": {
			books: []entry{newEntry(t, "a", "init", 1, "10"), newEntry(t, "a", "main", 1, "10"), newEntry(t, "b", "main", 0, "00")},
			want:  map[string]int{"a/init": 1, "a/main": 1, "b/main": 0}, changed: []gpu.PodUID{"a", "b"},
		},
		"leaves pods that are gone out": {
			books: []entry{newEntry(t, "a", "main", 1, "10")}, pods: none, want: map[string]int{},
		},
		"keeps what isn't in the checkpoint yet": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			want:   map[string]int{"a/main": 1},
		},
		"agrees without a change": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "a", "main", 1, "10")},
			want:   map[string]int{"a/main": 1},
		},
		"takes the checkpoint's word for the card": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "a", "main", 2, "10")},
			want:   map[string]int{"a/main": 2}, changed: []gpu.PodUID{"a"},
		},
		"finds out that a pod was taken for another": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "b", "main", 1, "10")},
			want:   map[string]int{"b/main": 1}, changed: []gpu.PodUID{"a", "b"},
		},
		"doesn't believe books that are older than what was served": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "ended", "main", 0, "10")}, age: time.Second,
			want: map[string]int{"a/main": 1, "ended/main": 0}, changed: []gpu.PodUID{"ended"},
		},
		"nor the card of a container that was given another one since": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "a", "main", 0, "00")}, age: time.Second,
			want: map[string]int{"a/main": 1},
		},
		"notices what the kubelet has lost": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all)
				r.Serve("b", "main", given(0, "00"))
			},
			want: map[string]int{"a/main lost": 1, "b/main": 0},
		},
		"takes a new kubelet to know its checkpoint only": {
			before: func(r *record) { r.Serve("b", "main", given(0, "00")); r.Settle() },
			want:   map[string]int{"b/main lost": 0},
		},
		"drops what the kubelet has lost and no object stands for": {
			before: func(r *record) { r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all) },
			pods:   none, want: map[string]int{},
		},
		"finds again what was lost": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")); r.Settle(); r.Sync(nil, start, all) },
			books:  []entry{newEntry(t, "a", "main", 1, "10")},
			want:   map[string]int{"a/main": 1},
		},
		"isn't misled when a kubelet without books gives the devices of what runs on to others": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all)
				r.Settle()
				r.Sync(nil, time.Time{}, all)
			},
			books: []entry{newEntry(t, "b", "main", 0, "10")},
			want:  map[string]int{"a/main lost": 1, "b/main": 0}, changed: []gpu.PodUID{"b"},
		},
		"finds out from a new kubelet's books as well that a pod was taken for another": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")); r.Settle() },
			books:  []entry{newEntry(t, "b", "main", 1, "10")},
			want:   map[string]int{"b/main": 1}, changed: []gpu.PodUID{"a", "b"},
		},
		"never replaces the card of a container that runs": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all)
				r.Settle()
				r.Sync(nil, time.Time{}, all)
			},
			books: []entry{newEntry(t, "a", "main", 0, "00")}, pods: apiPods{instance: "one"},
			want: map[string]int{"a/main": 1},
		},
		"but that of one that has been started again": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all)
				r.Sync(books(t, newEntry(t, "a", "main", 0, "00")), start, apiPods{instance: "one"})
			},
			books: []entry{newEntry(t, "a", "main", 0, "00")}, pods: apiPods{instance: "two"},
			want: map[string]int{"a/main": 0}, changed: []gpu.PodUID{"a"},
		},
		"takes the checkpoint's word, whatever runs, where it hasn't named the other card before": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "a", "main", 0, "00")}, pods: apiPods{instance: "one"},
			want: map[string]int{"a/main": 0}, changed: []gpu.PodUID{"a"},
		},
		"holds what was given to a pod that the API server doesn't have": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "unknown", "main", 1, "10")}, pods: none,
			want: map[string]int{"unknown/main": 1}, changed: []gpu.PodUID{"a", "unknown"},
		},
		"knows an answer that isn't ours": {
			books: []entry{{PodUID: "a", ContainerName: "main", ResourceName: "aliyun.com/gpu-mem", DeviceIDs: map[int64][]string{0: {"00"}}}},
			want:  map[string]int{"a/main": unknownCard}, changed: []gpu.PodUID{"a"},
		},
		"takes -1 for no card": {
			books: []entry{newEntry(t, "a", "main", -1, "00")},
			want:  map[string]int{"a/main": noCard}, changed: []gpu.PodUID{"a"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRecord()
			if test.before != nil {
				test.before(r)
			}
			changed := r.Sync(books(t, test.books...), start.Add(-test.age), test.pods)
			if diff := cmp.Diff(test.want, cardsOf(r)); diff != "" {
				t.Errorf("record (-want +got)\n%s", diff)
			}
			if diff := cmp.Diff(test.changed, changed); diff != "" {
				t.Errorf("changed (-want +got)\n%s", diff)
			}
		})
	}
}

func TestRecordForget(t *testing.T) {
	r := newRecord()
	r.Serve("a", "main", given(1, "10"))
	r.Forget("a")
	// The kubelet's checkpoint lists the pod until the next allocation.
	r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, apiPods{none: true})
	if got := cardsOf(r); len(got) != 0 {
		t.Errorf("a pod that is gone is remembered: %v", got)
	}
}

func TestRecordSnapshotStaysAsItWas(t *testing.T) {
	r := newRecord()
	r.Serve("a", "main", given(1, "10"))
	pods := r.Snapshot()
	pod := r.Pod("a")
	r.Serve("a", "main", given(0, "00"))
	r.Serve("a", "second", given(1, "11"))
	r.Serve("b", "main", given(1, "13"))
	r.Forget("a")
	want := servings{"main": given(1, "10")}
	if diff := cmp.Diff(served{"a": want}, pods); diff != "" {
		t.Errorf("the snapshot changed (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(want, pod); diff != "" {
		t.Errorf("the pod changed (-want +got)\n%s", diff)
	}
	delete(pods, "a")
	r.Serve("a", "main", given(1, "10"))
	if diff := cmp.Diff(map[string]int{"a/main": 1, "b/main": 1}, cardsOf(r)); diff != "" {
		t.Errorf("a caller changed the record (-want +got)\n%s", diff)
	}
}
