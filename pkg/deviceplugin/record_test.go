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

// cardsOf returns the card of each container, and "lost" ones marked.
func cardsOf(r *record) map[string]int {
	out := map[string]int{}
	pods, nameless := r.Snapshot()
	for uid, containers := range pods {
		for name, s := range containers {
			key := string(uid) + "/" + name
			if s.Lost {
				key += " lost"
			}
			out[key] = s.Card
		}
	}
	for range nameless {
		out["nameless"]++
	}
	return out
}

func given(card int, ids ...string) serving {
	return serving{Card: card, CardMemory: 16, Request: gpu.Memory(len(ids)), Devices: newDeviceSet(ids), At: start}
}

func TestRecordSync(t *testing.T) {
	all := func(gpu.PodUID) bool { return true }
	none := func(gpu.PodUID) bool { return false }
	for name, test := range map[string]struct {
		before func(*record)
		books  []entry
		// age is how long before start the books were written.
		age     time.Duration
		exists  func(gpu.PodUID) bool
		after   time.Duration
		want    map[string]int
		changed []gpu.PodUID
	}{
		"is rebuilt from the checkpoint": {
			books: []entry{newEntry(t, "a", "init", 1, "10"), newEntry(t, "a", "main", 1, "10"), newEntry(t, "b", "main", 0, "00")},
			want:  map[string]int{"a/init": 1, "a/main": 1, "b/main": 0}, changed: []gpu.PodUID{"a", "b"},
		},
		"leaves pods that are gone out": {
			books: []entry{newEntry(t, "a", "main", 1, "10")}, exists: none, want: map[string]int{},
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
		"gives nameless servings their name": {
			before: func(r *record) { r.ServeNameless(given(1, "10", "11")) },
			books:  []entry{newEntry(t, "static", "main", 1, "11", "10")}, exists: none,
			want: map[string]int{"static/main": 1}, changed: []gpu.PodUID{"static"},
		},
		"doesn't take the name from books that are older": {
			before: func(r *record) { r.ServeNameless(given(1, "10", "11")) },
			books:  []entry{newEntry(t, "ended", "main", 1, "11", "10")}, age: time.Second, exists: none,
			want: map[string]int{"nameless": 1},
		},
		"nor the card of a container that was given another one since": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")) },
			books:  []entry{newEntry(t, "a", "main", 0, "00")}, age: time.Second,
			want: map[string]int{"a/main": 1},
		},
		"holds what stays nameless for a while": {
			before: func(r *record) { r.ServeNameless(given(1, "10")) },
			after:  namelessFor, want: map[string]int{"nameless": 1},
		},
		"and no longer": {
			before: func(r *record) { r.ServeNameless(given(1, "10")) },
			after:  namelessFor + time.Second, want: map[string]int{},
		},
		"notices what the kubelet has lost": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all, start)
				r.Serve("b", "main", given(0, "00"))
			},
			want: map[string]int{"a/main lost": 1, "b/main": 0},
		},
		"takes a new kubelet to know its checkpoint only": {
			before: func(r *record) { r.Serve("b", "main", given(0, "00")); r.Settle() },
			want:   map[string]int{"b/main lost": 0},
		},
		"drops what the kubelet has lost and no object stands for": {
			before: func(r *record) { r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all, start) },
			exists: none, want: map[string]int{},
		},
		"finds again what was lost": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")); r.Settle(); r.Sync(nil, start, all, start) },
			books:  []entry{newEntry(t, "a", "main", 1, "10")},
			want:   map[string]int{"a/main": 1},
		},
		"isn't misled when a kubelet without books gives the devices of what runs on to others": {
			before: func(r *record) {
				r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, all, start)
				r.Settle()
				r.Sync(nil, time.Time{}, all, start)
			},
			books: []entry{newEntry(t, "b", "main", 0, "10")},
			want:  map[string]int{"a/main lost": 1, "b/main": 0}, changed: []gpu.PodUID{"b"},
		},
		"finds out from a new kubelet's books as well that a pod was taken for another": {
			before: func(r *record) { r.Serve("a", "main", given(1, "10")); r.Settle() },
			books:  []entry{newEntry(t, "b", "main", 1, "10")},
			want:   map[string]int{"b/main": 1}, changed: []gpu.PodUID{"a", "b"},
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
			exists := test.exists
			if exists == nil {
				exists = all
			}
			changed := r.Sync(books(t, test.books...), start.Add(-test.age), exists, start.Add(test.after))
			if diff := cmp.Diff(test.want, cardsOf(r)); diff != "" {
				t.Errorf("record (-want +got)\n%s", diff)
			}
			if diff := cmp.Diff(test.changed, changed); diff != "" {
				t.Errorf("changed (-want +got)\n%s", diff)
			}
		})
	}
}

// The time of a file lags behind the clock: what has got its name from one isn't older for it.
func TestRecordNamesWithoutAging(t *testing.T) {
	r := newRecord()
	r.ServeNameless(given(1, "10"))
	r.Sync(books(t, newEntry(t, "static", "main", 1, "10")), start.Add(-clockStep), func(gpu.PodUID) bool { return false }, start)
	if got := r.Pod("static")["main"]; !got.At.Equal(start) || !got.Booked {
		t.Errorf("got %+v, want what was served at %v", got, start)
	}
}

func TestRecordForget(t *testing.T) {
	r := newRecord()
	r.Serve("a", "main", given(1, "10"))
	r.Forget("a")
	// The kubelet's file lists it until its next allocation.
	r.Sync(books(t, newEntry(t, "a", "main", 1, "10")), start, func(gpu.PodUID) bool { return false }, start)
	if got := cardsOf(r); len(got) != 0 {
		t.Errorf("a pod that is gone is remembered: %v", got)
	}
}

func TestRecordSnapshotStaysAsItWas(t *testing.T) {
	r := newRecord()
	r.Serve("a", "main", given(1, "10"))
	r.ServeNameless(given(1, "12"))
	pods, nameless := r.Snapshot()
	pod := r.Pod("a")
	r.Serve("a", "main", given(0, "00"))
	r.Serve("a", "second", given(1, "11"))
	r.Serve("b", "main", given(1, "13"))
	r.Sync(books(t, newEntry(t, "static", "main", 1, "12")), start, func(gpu.PodUID) bool { return false }, start)
	r.Forget("a")
	want := servings{"main": given(1, "10")}
	if diff := cmp.Diff(served{"a": want}, pods); diff != "" {
		t.Errorf("the snapshot changed (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(want, pod); diff != "" {
		t.Errorf("the pod changed (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff([]serving{given(1, "12")}, nameless); diff != "" {
		t.Errorf("the nameless changed (-want +got)\n%s", diff)
	}
	delete(pods, "a")
	r.Serve("a", "main", given(1, "10"))
	if diff := cmp.Diff(map[string]int{"a/main": 1, "b/main": 1, "static/main": 1}, cardsOf(r)); diff != "" {
		t.Errorf("a caller changed the record (-want +got)\n%s", diff)
	}
}
