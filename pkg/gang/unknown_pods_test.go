package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Pods that nobody knows, and that the watch will never tell of therefore, don't fill the memory.
func TestStrangersAreBounded(t *testing.T) {
	mgr := New(Options{})
	for i := range maxUnknown + 100 {
		mgr.Filter(gpu.PodUID(fmt.Sprint(i)), nil, time.Unix(1, 0))
	}
	if got := len(mgr.unknownPods); got != maxUnknown {
		t.Errorf("%d are remembered, want %d", got, maxUnknown)
	}
	last := gpu.PodUID(fmt.Sprint(maxUnknown + 99))
	if _, ok := mgr.unknownPods[last]; !ok {
		t.Error("the last one isn't")
	}
}
