package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Pods that nobody knows, and that the watch will never tell of therefore, don't fill the memory.
func TestStrangersAreBounded(t *testing.T) {
	b := New(Options{})
	for i := range maxStrangers + 100 {
		b.Filter(gpu.PodUID(fmt.Sprint(i)), nil, time.Unix(1, 0))
	}
	if got := len(b.strangers); got != maxStrangers {
		t.Errorf("%d are remembered, want %d", got, maxStrangers)
	}
	last := gpu.PodUID(fmt.Sprint(maxStrangers + 99))
	if _, ok := b.strangers[last]; !ok {
		t.Error("the last one isn't")
	}
}
