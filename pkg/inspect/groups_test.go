package inspect

import (
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/protocol"
)

func (p podBuilder) member(group string, size int) podBuilder {
	p.Annotations[protocol.AnnotationGroupName] = group
	p.Annotations[protocol.AnnotationGroupSize] = strconv.Itoa(size)
	return p
}

func TestGroups(t *testing.T) {
	launcher := newPod("launcher", 0).member("mpi", 2)
	api := newFakeAPI(t, objects(nil,
		newPod("lonely", 8),
		newPod("a-0", 8).member("waits", 2).refused("0/1 nodes are available: 1 gang: there is no room for all members at once."),
		newPod("a-1", 8).member("waits", 2),
		newPod("b-0", 8).member("short", 3),
		launcher, newPod("worker", 8).member("mpi", 2),
		newPod("c-0", 8).member("runs", 2).on("n", 0), newPod("c-1", 8).member("runs", 2).on("n", 1),
		newPod("d-0", 8).member("half", 2).on("n", 0), newPod("d-1", 8).member("half", 2).refused("0/1 nodes are available"),
		newPod("e-0", 8).member("quarrels", 2), newPod("e-1", 8).member("quarrels", 3),
		newPod("f-0", 8).member("done", 1).on("n", 0).phase(corev1.PodSucceeded),
		newPod("g-0", 8).member("leaves", 2).on("n", 0).terminating(), newPod("g-1", 8).member("leaves", 2).on("n", 0),
		newPod("h-0", 8).member("elsewhere", 1).in("other"),
	))
	want := strings.TrimLeft(`
NAMESPACE  GROUP      SIZE  MEMBERS  BOUND  STATE       REASON
default    done       ?     0        0      Ended       -
default    half       2     2        1      Partial     0/1 nodes are available
default    leaves     2     1        1      Partial     -
default    mpi        2     1        0      Incomplete  1 of 2 members exist, and 1 that ask for no cards don't count
default    quarrels   3     2        0      Invalid     the members disagree on the group's size
default    runs       2     2        2      Bound       -
default    short      3     1        0      Incomplete  1 of 3 members exist
default    waits      2     2        0      Waiting     0/1 nodes are available: 1 gang: there is no room for all members at once.
other      elsewhere  1     1        0      Waiting     -
`, "\n")
	out, aside, err := execute(t, api, "--groups")
	if err != nil || aside != "" {
		t.Errorf("stderr %q, %v", aside, err)
	}
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if out, _, err := execute(t, api, "--groups", "--no-headers"); err != nil || !strings.HasPrefix(out, "default  done ") || strings.Count(out, "\n") != 9 {
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
	const why = "the group's name is not a valid label value: up to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends\n"
	want := "default  x^[]0;owned?^[[2J kube-system admin" + strings.Repeat(" ", 127) + "?  0  0  Invalid  " + why +
		"default  " + strings.Repeat("y", 159) + "…  ?  0  0  Invalid  " + why
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
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
