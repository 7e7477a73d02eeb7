package inspect

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

func (p podBuilder) member(group string, size int) podBuilder {
	p.Annotations[protocol.AnnotationGroupName] = group
	p.Annotations[protocol.AnnotationGroupSize] = strconv.Itoa(size)
	return p
}

// inRun marks the pod as bound in a run.
func (p podBuilder) inRun(id string) podBuilder {
	p.Annotations[protocol.AnnotationGroupRun] = id
	return p
}

// last marks the pod as the last one that was bound.
func (p podBuilder) last() podBuilder {
	p.Annotations[protocol.AnnotationGroupWhole] = "true"
	return p
}

// created sets the minute of the pod's creation.
func (p podBuilder) created(minute int) podBuilder {
	p.CreationTimestamp = metav1.Date(2026, 7, 1, 11, minute, 0, 0, time.UTC)
	return p
}

// boundSince sets the minute in which the pod was bound.
func (p podBuilder) boundSince(minute int) podBuilder {
	p.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Date(2026, 7, 1, 11, minute, 0, 0, time.UTC),
	}}
	return p
}

func (p podBuilder) controlled(by string) podBuilder {
	p.OwnerReferences = []metav1.OwnerReference{{UID: types.UID(by), Controller: new(true)}}
	return p
}

func (p podBuilder) gated(gate string) podBuilder {
	p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: gate}}
	return p
}

func TestGroups(t *testing.T) {
	launcher := newPod("launcher", 0).plain().member("mpi", 2)
	api := newFakeAPI(t, objects(nil,
		newPod("lonely", 8),
		newPod("a-0", 8).member("waits", 2).created(5).refused("0/1 nodes are available: 1 gang: there is no room for all members at once."),
		newPod("a-1", 8).member("waits", 2).created(4),
		newPod("b-0", 8).member("short", 3),
		launcher, newPod("worker", 8).member("mpi", 2),
		newPod("c-0", 8).member("runs", 2).on("n", 0), newPod("c-1", 8).member("runs", 2).on("n", 1),
		newPod("d-0", 8).member("half", 2).on("n", 0).inRun("1"), newPod("d-1", 8).member("half", 2).refused("0/1 nodes are available"),
		newPod("e-0", 8).member("quarrels", 2), newPod("e-1", 8).member("quarrels", 3),
		newPod("f-0", 8).member("done", 1).on("n", 0).phase(corev1.PodSucceeded),
		newPod("g-0", 8).member("leaves", 2).on("n", 0).terminating(), newPod("g-1", 8).member("leaves", 2).on("n", 0),
		newPod("h-0", 8).member("elsewhere", 1).in("other"),
		newPod("k-0", 0).plain().member("cardless", 2), newPod("k-1", 0).plain().member("cardless", 2), newPod("l-0", 0).plain().member("unsized", -1),
		newPod("i-0", 8).member("", 5).controlled("job"), newPod("i-1", 8).member("", 5).controlled("job"), newPod("i-2", 8).member("", 5).controlled("job"),
		newPod("i-3", 8).member("", 5).controlled("job"), newPod("i-4", 8).member("", 5).controlled("job"), newPod("j-0", 8).member("", 2),
	))
	want := strings.TrimLeft(`
NAMESPACE  GROUP                               SIZE  MEMBERS  BOUND  STATE       WAITS SINCE           REASON
default    <unnamed> i-0, i-1, i-2 and 3 more  ?     6        0      Invalid     -                     i-0: the pod has a group size and no group name: annotation scheduling.k8s.io/group-name is missing
default    cardless                            ?     0        0      Incomplete  -                     none of its 2 pods asks for cards
default    done                                ?     0        0      Ended       -                     -
default    half                                2     2        1      Broken      -                     only 1 of 2 members are bound
default    leaves                              2     1        1      Running     -                     -
default    mpi                                 2     1        0      Incomplete  -                     1 of 2 members exist, and 1 that ask for no cards don't count
default    quarrels                            ?     2        0      Invalid     -                     the members disagree on the group's size: e-0 says 2, e-1 says 3
default    runs                                2     2        2      Running     -                     -
default    short                               3     1        0      Incomplete  -                     1 of 3 members exist
default    unsized                             ?     0        0      Incomplete  -                     none of its 1 pods asks for cards
default    waits                               2     2        0      Pending     2026-07-01T11:05:00Z  there is no room for all members at once
other      elsewhere                           1     1        0      Pending     -                     kube-scheduler hasn't tried all other members yet
`, "\n")
	out, aside, err := execute(t, api, "--groups")
	if err != nil || aside != "" {
		t.Errorf("stderr %q, %v", aside, err)
	}
	check.Equal(t, "the result", want, out)
	if out, _, err := execute(t, api, "--groups", "--no-headers"); err != nil || !strings.HasPrefix(out, "default  <unnamed> ") || strings.Count(out, "\n") != 12 {
		t.Errorf("rows alone: %v\n%s", err, out)
	}
	for _, format := range []string{"json", "yaml"} {
		out, _, err := execute(t, api, "--groups", "-o", format)
		if err != nil || !strings.Contains(out, GroupsKind) || !strings.Contains(out, "quarrels") {
			t.Errorf("%s: %v\n%s", format, err, out)
		}
	}
	for _, args := range [][]string{{"-d"}, {"--pending"}, {"-w"}, {"n1"}, {"-l", "a=b"}, {"-o", "name"}} {
		if _, _, err := execute(t, api, append(args, "--groups")...); err == nil || !strings.Contains(err.Error(), "--groups shows groups of pods") {
			t.Errorf("with %v: %v", args, err)
		}
	}
	if out, aside, err := execute(t, newFakeAPI(t, Objects{}), "--groups"); err != nil || out != "" || aside != "No pod belongs to a group.\n" {
		t.Errorf("no groups: %q, %q, %v", out, aside, err)
	}
}

// TestGroupRuns checks how the pods of one group are split into runs, and the state of each run.
func TestGroupRuns(t *testing.T) {
	bound := func(name, run string) podBuilder { return newPod(name, 8).member("g", 2).on("n", 0).inRun(run) }
	pending := func(name string) podBuilder { return newPod(name, 8).member("g", 2) }
	const noRoom = "0/3 nodes are available: 1 Insufficient cpu, 2 gang: there is no room for all members at once."
	otherSchedulers := reasons.GroupAwaitsOthers.OfSchedulers([]string{"default-scheduler", "volcano"})
	for name, test := range map[string]struct {
		pods []podBuilder
		want []string
	}{
		"new pods of the job replace failed ones": {
			[]podBuilder{bound("a", "1").controlled("job").last(), bound("b", "1").controlled("job").phase(corev1.PodFailed), pending("c").controlled("job")},
			[]string{"1: Running 1/2"},
		},
		"another job's pods are the next run": {
			[]podBuilder{bound("a", "1").controlled("old").last(), bound("b", "1").controlled("old"), pending("c").controlled("new"), pending("d").controlled("new").refused(noRoom)},
			[]string{"1: Running 2/2", ": Pending 0/2: there is no room for all members at once"},
		},
		"some members are bound, and no member marks the run": {
			[]podBuilder{bound("a", "1").boundSince(5), pending("b").created(4).refused(noRoom)},
			[]string{"1: Broken 1/2: only 1 of 2 members are bound, there is no room for all members at once"},
		},
		"the pending member was created after the others were bound": {
			[]podBuilder{bound("a", "1").boundSince(5), pending("b").created(6)}, []string{"1: Running 1/2"},
		},
		"a group that runs, and a further pod that is invalid": {
			[]podBuilder{bound("a", "1").last(), bound("b", "1"), pending("c").with(func(p *corev1.Pod) { p.Labels = map[string]string{protocol.LabelCount: "x"} })},
			[]string{"1: Running 2/3"},
		},
		"a group that is bound in part, and a pod with another number": {
			[]podBuilder{bound("a", "1").boundSince(5), pending("b").created(4), pending("c").created(4).member("g", 3)},
			[]string{"1: Broken 1/3: only 1 of 2 members are bound"},
		},
		"the extender knows that a member was deleted before all were bound": {
			[]podBuilder{bound("a", "1").boundSince(5), pending("b").created(6).refused("0/1 nodes are available: 1 gang: only 1 of 2 members are bound, the group is retried after a pause.")},
			[]string{"1: Broken 1/2: only 1 of 2 members are bound, the group is retried after a pause"},
		},
		"the same, and the bound members are evicted": {
			[]podBuilder{bound("a", "1").boundSince(5), pending("b").created(6).refused("1 " + reasons.GroupEvicting.Text())},
			[]string{"1: Broken 1/2: the group was partially bound, and is being evicted"},
		},
		"members with scheduling gates don't count": {
			[]podBuilder{pending("a").gated("quota"), pending("b")}, []string{": Incomplete 0/2: 1 of 2 members exist; not counted: 1 with scheduling gates or an invalid group, such as a"},
		},
		"but those with the gate of fair shares do": {
			[]podBuilder{pending("a").gated(protocol.GateFairShare), pending("b")}, []string{": Pending 0/2: not all members have had their turn by fair sharing"},
		},
		"the extender's details about missing members": {
			[]podBuilder{pending("a").refused("0/1 nodes are available: 1 gang: 1 of 2 members exist and more.")},
			[]string{": Incomplete 0/1: 1 of 2 members exist and more"},
		},
		"an outdated number": {
			[]podBuilder{pending("a").refused("0/1 nodes are available: 1 gang: 0 of 2 members exist.")},
			[]string{": Incomplete 0/1: 1 of 2 members exist"},
		},
		"the reason that says most": {
			[]podBuilder{
				pending("a").refused("1 " + reasons.GroupAwaitsOthers.Text()), pending("b").refused(noRoom), pending("c").refused(noRoom),
				pending("d").refused("1 " + reasons.GroupSurplus.Text()), pending("e").refused("1 " + reasons.GroupSurplus.Text()), pending("f").refused("1 " + reasons.GroupSurplus.Text()),
			},
			[]string{": Pending 0/6: there is no room for all members at once"},
		},
		"several schedulers, of which the last doesn't call the extender": {
			[]podBuilder{
				pending("a").refused("0/1 nodes are available: 1 " + otherSchedulers.Text() + "."),
				pending("b").with(func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" }),
			},
			[]string{": Pending 0/2: " + otherSchedulers.Words},
		},
		"kube-scheduler itself finds no node": {
			[]podBuilder{pending("a").refused("0/1 nodes are available: 1 Insufficient cpu."), pending("b").refused("1 " + reasons.GroupAwaitsOthers.Text())},
			[]string{": Pending 0/2: 0/1 nodes are available: 1 Insufficient cpu."},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, g := range BuildGroups(objects(nil, test.pods...).Pods, nil, time.Now()).Groups {
				text := fmt.Sprintf("%s: %s %d/%d", g.Run, g.State, g.Bound, g.Members)
				if g.Reason != "" {
					text += ": " + g.Reason
				}
				got = append(got, text)
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// belowMinCount is what is said of the replacement in a PodGroup of three, of which one has ended.
const belowMinCount = "2 of 3 members exist; kube-scheduler tries no pod of a PodGroup that has fewer, and doesn't count pods that have ended"

// TestNativeGroups: the pods of a PodGroup are shown like those of other groups, unless it places them one by one.
func TestNativeGroups(t *testing.T) {
	api := newFakeAPI(t, objects(nil,
		of("train", newPod("a-0", 8)), of("train", newPod("a-1", 8)), newPod("b-0", 8).member("train", 1).on("n", 0),
		of("late", newPod("c-0", 8)), of("alone", newPod("d-0", 8)), of("both", newPod("e-0", 8).member("both", 1)),
		of("ran", newPod("g-0", 8).on("n", 0).inRun("1").last()), of("ran", newPod("g-1", 8).on("n", 0).inRun("1").phase(corev1.PodSucceeded)), of("ran", newPod("g-2", 8)),
	))
	putPodGroups(api, map[string]int32{"train": 3, "alone": 0, "ran": 3})
	const (
		ran       = "default  podgroup/ran    3  2  1  Running     -  " + belowMinCount + "\n"
		annotated = "default  train           1  1  1  Running     -  -\n"
		both      = "default  both            ?  1  0  Invalid     -  e-0: the pod has spec.schedulingGroup and also annotations or labels of a group: only one of both can count\n"
		late      = "default  podgroup/late   ?  1  0  Invalid     -  c-0: PodGroup late doesn't exist\n"
		train     = "default  podgroup/train  3  2  0  Incomplete  -  2 of 3 members exist\n"
	)
	for podGroups, want := range map[string]string{
		"PodGroup": both + late + ran + annotated + train,
		"":         "default  both   1  1  0  Pending  -  kube-scheduler hasn't tried all other members yet\ndefault  train  1  1  1  Running  -  -\n",
	} {
		api.podGroups = podGroups
		out, aside, err := execute(t, api, "--groups", "--no-headers")
		if diff := cmp.Diff(want, out); diff != "" || err != nil || aside != "" {
			t.Errorf("PodGroups %q: stderr %q, %v (-want +got):\n%s", podGroups, aside, err, diff)
		}
	}
}

// TestNativeGroupsPending: what is said of pods that kube-scheduler doesn't try, or not any more, because of their PodGroup.
func TestNativeGroupsPending(t *testing.T) {
	objects := objects([]nodeBuilder{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 16))},
		of("train", newPod("a-0", 8).created(3)), of("late", newPod("b-0", 8).created(3)), of("alone", newPod("c-0", 8).created(3)),
		// The extender may not treat PodGroups as groups.
		of("late", newPod("e-0", 8).created(3).refused("0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.")),
		of("both", newPod("f-0", 8).member("both", 2).created(3).refused("0/1 nodes are available: 1 gang: 1 of 2 members exist.")),
		of("ran", newPod("g-0", 4).on("n", 0).inRun("1").last()), of("ran", newPod("g-1", 4).on("n", 0).inRun("1").phase(corev1.PodSucceeded)),
		of("ran", newPod("g-2", 4).created(3)),
	)
	api := newFakeAPI(t, objects)
	putPodGroups(api, map[string]int32{"train": 3, "alone": 0, "ran": 3})
	const (
		untried = "scheduler \"default-scheduler\" has not tried it for TIME: is a scheduler of this name running?\n"
		tried   = "default  e-0  8  other_constraint  n has room for it, 12 GiB on one card, but kube-scheduler rejects the pod: 1 node(s) didn't have free ports for the requested pod ports\n" +
			"default  f-0  8  waits_for_group   group default/both waits since 2026-07-01T11:03:00Z: 1 of 2 members exist\n"
	)
	check := func(name, want string) {
		out, aside, err := execute(t, api, "--pending", "--no-headers")
		out = regexp.MustCompile(`tried it for \w+:`).ReplaceAllString(out, "tried it for TIME:")
		if diff := cmp.Diff(want, out); diff != "" || err != nil || aside != "" {
			t.Errorf("%s: stderr %q, %v (-want +got):\n%s", name, aside, err, diff)
		}
	}
	api.podGroups = "PodGroup"
	check("PodGroups are known", "default  a-0  8  waits_for_group   group default/train waits since 2026-07-01T11:03:00Z: 1 of 3 members exist\n"+
		"default  b-0  8  invalid_group     group default/late is invalid: PodGroup late doesn't exist\n"+
		"default  c-0  8  not_tried         "+untried+
		strings.Replace(tried, "both waits since 2026-07-01T11:03:00Z", "both waits", 1)+
		"default  g-2  4  waits_for_group   group default/ran waits since 2026-07-01T11:03:00Z: "+belowMinCount+"\n")
	api.podGroups = ""
	check("the API server has none", "default  a-0  8  not_tried         "+untried+"default  b-0  8  not_tried         "+untried+"default  c-0  8  not_tried         "+untried+tried+
		"default  g-2  4  not_tried         "+untried)
	api.namespace = "default"
	out, aside, err := execute(t, api, "--pending", "--no-headers", "-n", "default")
	if want := notSeen + " " + podGroupsNotSeen + "\n"; err != nil || aside != want || !strings.Contains(out, "default  a-0  8  not_tried") {
		t.Errorf("PodGroups can't be listed: stderr %q, %v:\n%s", aside, err, out)
	}
}

// of makes the pod a member of the PodGroup.
func of(group string, p podBuilder) podBuilder {
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &group}
	return p
}

// putPodGroups creates PodGroups by their names and minCounts; of 0, with the policy basic.
func putPodGroups(api *fakeAPI, groups map[string]int32) {
	for name, n := range groups {
		policy := schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}
		if n > 0 {
			policy = schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: n}}
		}
		api.put(&schedulingv1beta1.PodGroup{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: schedulingv1beta1.PodGroupSpec{SchedulingPolicy: policy},
		})
	}
}

// The states are named like the phases of package gang.
func TestGroupStates(t *testing.T) {
	for state, phase := range map[string]gang.Phase{
		GroupIncomplete: gang.PhaseIncomplete, GroupPending: gang.PhasePending, GroupRunning: gang.PhaseRunning, GroupBroken: gang.PhaseBroken,
	} {
		if strings.ToLower(state) != phase.String() {
			t.Errorf("%s, want %s", state, phase)
		}
	}
}

// TestGroupNamesSanitized checks that a group's name, which a pod's author chooses, is sanitized before it is written.
func TestGroupNamesSanitized(t *testing.T) {
	api := newFakeAPI(t, objects(nil,
		newPod("p", 8).member("x\x1b]0;owned\x07\x1b[2J\nkube-system\tadmin\u202e", 2),
		newPod("q", 8).member(strings.Repeat("y", 100_000), 2),
	))
	out, aside, err := execute(t, api, "--groups", "--no-headers")
	if err != nil || aside != "" {
		t.Errorf("stderr %q, %v", aside, err)
	}
	const why = "the group's name is not a valid label value: up to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends: " +
		"annotation scheduling.k8s.io/group-name is "
	want := "default  x^[]0;owned?^[[2J kube-system admin" + strings.Repeat(" ", 267) + "?  1  0  Invalid  -  p: " + why +
		`"x\x1b]0;owned\a\x1b[2J\nkube-system\tadmin\u202e"` + "\n" +
		"default  " + strings.Repeat("y", 299) + "…  ?  1  0  Invalid  -  q: " + why + `"` + strings.Repeat("y", 70) + `"` + "\n"
	check.Equal(t, "the result", want, out)
}

// No name keeps JSON and YAML from being written, or has a terminal act on it, and none is changed.
func TestGroupNamesInJSONAndYAML(t *testing.T) {
	const name = "x\x1b\x7f\u009b\ufffe"
	api := newFakeAPI(t, objects(nil, newPod("p", 8).member(name, 2)))
	for format, want := range map[string]string{"json": `"name": "x\u001b\u007f\u009b\ufffe",`, "yaml": `name: "x\e\x7F\x9B\uFFFE"`} {
		out, _, err := execute(t, api, "--groups", "-o", format)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v: %q lacks %q", format, err, out, want)
		}
		var groups Groups
		if err := yaml.Unmarshal([]byte(out), &groups); err != nil || groups.Groups[0].Name != name {
			t.Errorf("%s: %v: read back as %+v", format, err, groups)
		}
	}
}
