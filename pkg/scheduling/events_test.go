package scheduling

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Each pod gets an Event in normal operation. In a storm few do, but each failure is still reported.
func TestAStormOfPodsMakesFewEvents(t *testing.T) {
	objects := []runtime.Object{newNode(t, "n1", 1000)}
	var pods []*corev1.Pod
	for i := range assumedEventsBurst + 30 {
		pod := newPod(fmt.Sprintf("p%d", i), 1)
		pods, objects = append(pods, pod), append(objects, pod)
	}
	tooLarge := newPod("too-large", 2000)
	f := start(t, patient, append(objects, tooLarge)...)
	events := func() (n int) {
		for len(f.events) > 0 {
			if event := <-f.events; strings.HasPrefix(event, "Normal "+EventAssumed) {
				n++
			}
		}
		return n
	}
	last := len(pods) - 1
	for _, pod := range pods[:last] {
		if err := f.bind(pod); err != nil {
			t.Fatal(err)
		}
	}
	if got := events(); got != assumedEventsBurst {
		t.Errorf("%d Events, want %d", got, assumedEventsBurst)
	}
	if err := f.bind(tooLarge); err == nil {
		t.Error("what is too large was bound")
	}
	if event := <-f.events; !strings.HasPrefix(event, "Warning "+EventNotAssumed) {
		t.Errorf("event %q", event)
	}
	f.clock.Step(time.Second)
	if err := f.bind(pods[last]); err != nil {
		t.Fatal(err)
	}
	if got := events(); got != 1 {
		t.Errorf("%d Events for one pod after the storm", got)
	}
}
