package main

import (
	"fmt"
	"strconv"
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

func TestJudgeLeft(t *testing.T) {
	zero := []map[string]float64{{"a": 0}, {"a": 0}}
	empty := framework.Allocations{"n": {0: {Total: 15}}}
	for name, tc := range map[string]struct {
		pods    int
		ledger  framework.Allocations
		counted []map[string]float64
		want    string
	}{
		"nothing":                      {0, empty, zero, ""},
		"a pod":                        {1, empty, zero, "1 pods"},
		"memory on a card":             {0, framework.Allocations{"n": {0: {Total: 15, Used: 2}}}, zero, "card 0 of n has 2 units"},
		"an allocation of the standby": {0, empty, []map[string]float64{{"a": 0}, {"a": 1}}, "replica 1 counts 1 of a"},
		"metrics that aren't there":    {0, empty, []map[string]float64{{}, {"a": 0}}, "replica 0 counts nothing"},
	} {
		err := judgeLeft(make([]corev1.Pod, tc.pods), tc.ledger, tc.counted)
		if tc.want == "" && err != nil || tc.want != "" && !strings.Contains(fmt.Sprint(err), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

func TestJudgeLoad(t *testing.T) {
	some := []event{{what: "fault"}, {what: "update", update: true}}
	for name, tc := range map[string]struct {
		counts counts
		events []event
		passes bool
	}{
		"pods ran, and something failed": {counts{created: 10, ended: 8}, some, true},
		"few pods ran":                   {counts{created: 10, ended: 4}, some, false},
		"nothing failed":                 {counts{created: 10, ended: 8}, some[1:], false},
		"nothing was updated":            {counts{created: 10, ended: 8}, some[:1], false},
	} {
		if err := judgeLoad(tc.counts, tc.events); (err == nil) != tc.passes {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRates checks the figures that come from the growth of counters: the mean duration of calls, and the writes for each bound pod.
func TestRates(t *testing.T) {
	r := &record{pods: 4}
	r.rates(map[string]float64{
		metricSeconds + `{verb="filter"}`: 2, metricCalls + `{verb="filter"}`: 4,
		metricWrites + `{kind="binding"}`: 5, metricWrites + `{kind="event"}`: 1,
	})
	got := map[string]string{}
	for _, s := range r.all {
		got[s.name] = strconv.FormatFloat(s.samples[0].value, 'f', -1, 64)
	}
	if got["filter, mean"] != "500" || got["writes to the API server"] != "1.5" || len(got) != 2 {
		t.Errorf("got %v, want 500 ms for filter, and 1.5 writes", got)
	}
}
