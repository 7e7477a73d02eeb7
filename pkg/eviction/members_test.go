package eviction

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestMembers(t *testing.T) {
	for name, test := range map[string]struct {
		answer, standby error
		wantEvicted     int
		wantCalls       []string
	}{
		"it is evicted":             {nil, nil, 1, []string{"a5"}},
		"a budget rejects it":       {apierrors.NewTooManyRequests("the budget", 0), nil, 0, []string{"a5"}},
		"it is gone already":        {apierrors.NewNotFound(fake.PodResource, "a5"), nil, 0, []string{"a5"}},
		"another pod has its name":  {apierrors.NewConflict(fake.PodResource, "a5", errors.New("UID")), nil, 0, []string{"a5"}},
		"this replica doesn't lead": {nil, errors.New("standby"), 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.standby = test.standby
			f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return test.answer }})
			recorder, evicted := record.NewFakeRecorder(10), 0
			m := NewMembers(f.options(recorder), func() { evicted++ })
			m.evict(t.Context(), gpu.Pod{Namespace: "default", Name: "a5", UID: "uid-a5"})
			if events := len(recorder.Events); evicted != test.wantEvicted || events != test.wantEvicted {
				t.Errorf("%d evicted, %d Events, want %d", evicted, events, test.wantEvicted)
			}
			f.wantEvicted(test.wantCalls...)
			if got := f.observer.Count("write eviction"); got != len(test.wantCalls) {
				t.Errorf("%d writes counted", got)
			}
		})
	}
}

// Requests that arrive while earlier ones are in progress are dropped. The gang's manager repeats them.
func TestMembersWhileBusy(t *testing.T) {
	f := newFixture(t, nil)
	answer := make(chan error)
	f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return <-answer }})
	m := NewMembers(f.options(record.NewFakeRecorder(10)), func() {})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	evict := func(pod string, calls int) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); len(f.server.Calls().Evicted) < calls; time.Sleep(time.Millisecond) {
			if m.Evict([]gpu.Pod{{Name: pod}}); time.Now().After(deadline) {
				t.Fatal("timed out waiting for an eviction")
			}
		}
	}
	evict("a", 1)
	m.Evict([]gpu.Pod{{Name: "dropped"}})
	answer <- nil
	evict("b", 2)
	answer <- nil
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if got := f.server.Calls().Evicted; !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("evicted %v", got)
	}
}
