package main

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestBook gives the book changes of pods in the API server's order. want is a part of the last one's error.
func TestBook(t *testing.T) {
	pod := func(name string, memory int64, cards string) *framework.PodWrapper {
		return framework.MakePod(name).UID(types.UID(name)).GPUMem(memory).Node("n").Annotation(protocol.AnnotationIndex, cards)
	}
	ended := pod("ended", 15, "0")
	ended.Status.Phase = corev1.PodSucceeded
	deleting := pod("a", 10, "0").GracePeriod(1)
	type change struct {
		pod     *framework.PodWrapper
		deleted bool
	}
	for name, tc := range map[string]struct {
		changes []change
		want    string
	}{
		"two pods that fill a card":           {[]change{{pod: pod("a", 10, "0")}, {pod: pod("b", 5, "0")}}, ""},
		"two pods that are too much":          {[]change{{pod: pod("a", 10, "0")}, {pod: pod("b", 6, "0")}}, "card 0 of node n has allocated 16 of 15"},
		"the same on two cards":               {[]change{{pod: pod("a", 10, "0")}, {pod: pod("b", 6, "1")}}, ""},
		"a pod with two cards":                {[]change{{pod: pod("a", 10, "1")}, {pod: pod("b", 12, "0,1")}}, "card 1 of node n has allocated 16 of 15"},
		"after a pod is deleted":              {[]change{{pod: pod("a", 10, "0")}, {pod: pod("a", 10, "0"), deleted: true}, {pod: pod("b", 6, "0")}}, ""},
		"while a pod is being deleted":        {[]change{{pod: pod("a", 10, "0")}, {pod: deleting}, {pod: pod("b", 6, "0")}}, "has allocated 16"},
		"after a pod has ended":               {[]change{{pod: pod("ended", 15, "0")}, {pod: ended}, {pod: pod("b", 15, "0")}}, ""},
		"a pod whose annotation is corrected": {[]change{{pod: pod("a", 10, "0")}, {pod: pod("a", 10, "1")}, {pod: pod("b", 10, "0")}}, ""},
		"a second container":                  {[]change{{pod: pod("a", 10, "0").Container("second", 6)}}, "has allocated 16"},
		"a pending pod":                       {[]change{{pod: pod("a", 10, "0")}, {pod: pod("b", 10, "").Node("")}}, ""},
		"a bound pod without a card":          {[]change{{pod: pod("a", 10, "")}}, `pod a is on node n with cards ""`},
		"a card that doesn't exist":           {[]change{{pod: pod("a", 10, "2")}}, `pod a is on node n with cards "2"`},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBook(2, 15)
			var err error
			for i, c := range tc.changes {
				if err != nil {
					t.Errorf("change %d: %v", i-1, err)
				}
				err = b.apply(c.pod.Obj(), c.deleted)
			}
			if tc.want == "" && err != nil || tc.want != "" && !strings.Contains(fmt.Sprint(err), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
