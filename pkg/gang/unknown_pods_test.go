package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestUnknownPodsBounded: filter calls for pods that don't exist must not exhaust the memory.
func TestUnknownPodsBounded(t *testing.T) {
	mgr := New(Options{})
	for i := range maxUnknown + 100 {
		mgr.Filter(gpu.PodUID(fmt.Sprint(i)), nil, time.Unix(1, 0))
	}
	if got := len(mgr.unknownPods); got != maxUnknown {
		t.Errorf("%d unknown pods remembered, want %d", got, maxUnknown)
	}
	last := gpu.PodUID(fmt.Sprint(maxUnknown + 99))
	if _, ok := mgr.unknownPods[last]; !ok {
		t.Error("the last one is not remembered")
	}
}
