package eviction

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fake"
)

func TestMembers(t *testing.T) {
	for name, test := range map[string]struct {
		answer, standby error
		wantEvicted     int
		wantCalls       []string
	}{
		"it is evicted":             {nil, nil, 1, []string{"a5"}},
		"a budget rejects it":       {budgetRefusal(), nil, 0, []string{"a5"}},
		"it is gone already":        {apierrors.NewNotFound(fake.PodResource, "a5"), nil, 0, []string{"a5"}},
		"another pod has its name":  {apierrors.NewConflict(fake.PodResource, "a5", errors.New("UID")), nil, 0, []string{"a5"}},
		"this replica doesn't lead": {nil, errors.New("standby"), 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.standby = test.standby
			f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return test.answer }})
			recorder, evicted := record.NewFakeRecorder(10), 0
			m := NewMemberEvictor(f.options(recorder), func() { evicted++ })
			m.EvictMember(t.Context(), gpu.Pod{Namespace: "default", Name: "a5", UID: "uid-a5"})
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
