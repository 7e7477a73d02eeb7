package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fairness"
)

// The seed decides which team asks for what, and in which order.
func TestNewTeams(t *testing.T) {
	draw := func(seed int64) (all []string, jobs []job) {
		for _, t := range newTeams(8, 400, seed) {
			all = append(all, t.name+" "+t.restriction.String())
			for range t.pods {
				jobs = append(jobs, t.next())
			}
		}
		return all, jobs
	}
	teams, jobs := draw(1)
	if diff := cmp.Diff([]string{
		"tenant-00 nothing", "tenant-01 CPU", "tenant-02 nothing", "tenant-03 pool 1", "tenant-04 nothing", "tenant-05 CPU", "tenant-06 nothing", "tenant-07 pool 2",
	}, teams); diff != "" {
		t.Error(diff)
	}
	_, again := draw(1)
	_, other := draw(2)
	if len(jobs) != 400 || !cmp.Equal(jobs, again, cmp.AllowUnexported(job{})) || cmp.Equal(jobs, other, cmp.AllowUnexported(job{})) {
		t.Errorf("%d jobs, or the seed doesn't decide them", len(jobs))
	}
	for _, j := range jobs {
		if j.memory < 1 || j.memory > cardUnits || j.run < shortestRun || j.run > longestRun {
			t.Errorf("%v is outside the limits", j)
		}
	}
}

func TestJudge(t *testing.T) {
	teams := []*team{{name: "a", weight: 1}, {name: "b", weight: 1}}
	r := fairness.Room{Memory: [fairness.Pools]int64{0, 0, 20}}
	got := judge([]sample{
		{0, []int64{20, 0}, []int64{20, 20}},
		{time.Second, []int64{11, 9}, []int64{20, 20}},
		{2 * time.Second, []int64{10, 10}, []int64{20, 20}},
		{3 * time.Second, []int64{15, 5}, []int64{20, 20}},
	}, teams, r, 2*time.Second)
	want := verdict{
		mean: 0.9, least: 0.8, adapted: "1.0 s", used: 1,
		lowest: "b with weight 1, restricted by nothing: 0.75 of what it deserves",
	}
	check.Equal(t, "the result", want, got, cmp.AllowUnexported(verdict{}))
}
