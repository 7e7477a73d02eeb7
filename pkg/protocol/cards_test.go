package protocol

import (
	"maps"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// counted builds a pod with the label, unless it is empty.
func counted(label string, containers ...corev1.Container) *corev1.Pod {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: containers}}
	if label != "" {
		pod.Labels = map[string]string{LabelCount: label}
	}
	return pod
}

// wants builds a container that asks for memory and cores; empty amounts are left out.
func wants(name, memory, cores string) corev1.Container {
	limits := corev1.ResourceList{}
	for resource, amount := range map[corev1.ResourceName]string{ResourceMemory: memory, ResourceCores: cores} {
		maps.Copy(limits, list(resource, amount))
	}
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: limits}}
}

func TestCheckRequest(t *testing.T) {
	type containers = []corev1.Container
	const bad = " is not a number of cards, 1 to 64"
	for name, tc := range map[string]struct {
		label     string
		app, init containers
		cards     int // Of protocol.Pod.
		cores     gpu.Cores
		err       string
	}{
		"no label":                            {app: containers{wants("a", "7", "")}},
		"one card":                            {label: "1", app: containers{wants("a", "7", "")}},
		"two cards":                           {label: "2", app: containers{wants("a", "8", ""), wants("b", "", ""), wants("c", "2", "")}, cards: 2},
		"the largest number of cards":         {label: "64", app: containers{wants("a", "64", "")}, cards: 64},
		"too many cards":                      {label: "65", app: containers{wants("a", "65", "")}, err: `label aliyun.com/gpu-count: "65"` + bad},
		"no cards":                            {label: "0", app: containers{wants("a", "8", "")}, err: `label aliyun.com/gpu-count: "0"` + bad},
		"an empty label":                      {label: " ", app: containers{wants("a", "8", "")}, err: `label aliyun.com/gpu-count: " "` + bad},
		"a word":                              {label: "two", app: containers{wants("a", "8", "")}, err: `label aliyun.com/gpu-count: "two"` + bad},
		"leading zeros":                       {label: "02", app: containers{wants("a", "8", "")}, err: `label aliyun.com/gpu-count: "02"` + bad},
		"past 64 bits":                        {label: "18446744073709551618", app: containers{wants("a", "8", "")}, err: `label aliyun.com/gpu-count: "18446744073709551618"` + bad},
		"a label without GPU memory":          {label: "x", app: containers{wants("a", "", "")}},
		"memory that can't be divided":        {label: "2", app: containers{wants("a", "8", ""), wants("b", "3", "")}, cards: 2, err: "container b: aliyun.com/gpu-mem 3 can't be divided evenly over 2 cards"},
		"initialization that can't be":        {label: "2", init: containers{wants("i", "3", "")}, app: containers{wants("a", "8", "")}, cards: 2, err: "container i: aliyun.com/gpu-mem 3 can't be divided evenly over 2 cards"},
		"cores":                               {app: containers{wants("a", "8", "30")}, cores: 30},
		"no multiple of five":                 {app: containers{wants("a", "8", "7")}, cores: 7},
		"cores beside a container without":    {app: containers{wants("a", "8", "30"), wants("b", "8", "")}, cores: 30},
		"cores over two cards":                {label: "2", app: containers{wants("a", "8", "200")}, cards: 2, cores: 200},
		"cores that can't be divided":         {label: "2", app: containers{wants("a", "8", "25")}, cards: 2, cores: 25, err: "container a: aliyun.com/gpu-core.percentage 25 can't be divided evenly over 2 cards"},
		"cores without memory":                {app: containers{wants("a", "8", ""), wants("b", "", "25")}, cores: 25, err: "container b: aliyun.com/gpu-core.percentage 25 without aliyun.com/gpu-mem"},
		"cores alone":                         {app: containers{wants("a", "", "25")}, cores: 25, err: "container a: aliyun.com/gpu-core.percentage 25 without aliyun.com/gpu-mem"},
		"more cores than a card has":          {app: containers{wants("a", "8", "60"), wants("b", "8", "50")}, cores: 110, err: "aliyun.com/gpu-core.percentage is 110 in total, one card has 100"},
		"more cores than two cards have":      {label: "2", app: containers{wants("a", "8", "202")}, cards: 2, cores: 202, err: "aliyun.com/gpu-core.percentage is 202 in total, 2 cards have 200"},
		"initialization with as many as apps": {init: containers{wants("i", "8", "100")}, app: containers{wants("a", "8", "60"), wants("b", "8", "40")}, cores: 100},
	} {
		pod := counted(tc.label, tc.app...)
		pod.Spec.InitContainers = tc.init
		expect(t, name, tc.err, message(CheckRequest(pod)))
		got := Pod(pod)
		expect(t, name+": cards and cores", []any{tc.cards, tc.cores}, []any{got.Cards, got.Cores})
	}
}

// TestRDMALabel: the label has two values, and the reason for another one says which. It means nothing on a pod without GPU memory.
func TestRDMALabel(t *testing.T) {
	const bad = ` is neither preferred nor required: write one of these, or remove the label`
	for value, tc := range map[string]struct {
		want gpu.RDMA
		err  string
	}{
		"preferred":              {want: gpu.RDMAPreferred},
		"required":               {want: gpu.RDMARequired},
		"":                       {err: `label gpushare.aliyun.com/rdma: ""` + bad},
		"Required":               {err: `label gpushare.aliyun.com/rdma: "Required"` + bad},
		"required ":              {err: `label gpushare.aliyun.com/rdma: "required "` + bad},
		"true":                   {err: `label gpushare.aliyun.com/rdma: "true"` + bad},
		"none":                   {err: `label gpushare.aliyun.com/rdma: "none"` + bad},
		"mlx5_0":                 {err: `label gpushare.aliyun.com/rdma: "mlx5_0"` + bad},
		strings.Repeat("x", 100): {err: `label gpushare.aliyun.com/rdma: "` + strings.Repeat("x", 32) + `"` + bad},
	} {
		pod := counted("", wants("a", "8", ""))
		pod.Labels = map[string]string{LabelRDMA: value}
		expect(t, value, tc.err, message(CheckRequest(pod)))
		expect(t, value+": the pod", tc.want, Pod(pod).RDMA)
		outline, _ := Outline(pod)
		expect(t, value+": its outline", tc.want, Pod(outline).RDMA)

		without := counted("", wants("a", "", ""))
		without.Labels = pod.Labels
		expect(t, value+" without GPU memory", "", message(CheckRequest(without)))
		expect(t, value+" without GPU memory: the pod", gpu.RDMANone, Pod(without).RDMA)
	}
	expect(t, "without the label", gpu.RDMANone, Pod(counted("", wants("a", "8", ""))).RDMA)
}

// FuzzRequest checks for an arbitrary label and arbitrary amounts that a request is either invalid, or is divided evenly over its
// cards and can be read back from the annotations.
func FuzzRequest(f *testing.F) {
	f.Fuzz(func(t *testing.T, label, first, second, init, cores string) {
		parse := func(amount string) string { // An amount that the API server would accept.
			n, err := strconv.ParseInt(amount, 10, 64)
			if err != nil || n < 0 {
				return ""
			}
			return strconv.FormatInt(n, 10)
		}
		pod := counted(label, wants("a", parse(first), parse(cores)), wants("b", parse(second), ""))
		pod.Spec.InitContainers = []corev1.Container{wants("i", parse(init), "")}
		got, err := Pod(pod), CheckRequest(pod)
		if got.Cards < 0 || got.Cards == 1 || got.Cards > gpu.MaxCards || got.Request < 0 || got.Cores < 0 {
			t.Fatalf("out of bounds: %+v", got)
		}
		if err != nil {
			if len(err.Error()) > 300 || !strings.Contains(err.Error(), "aliyun.com/gpu-") {
				t.Errorf("the error doesn't say what is wrong: %v", err)
			}
			return
		}
		demand := got.Demand()
		if demand.Cores > gpu.CardCores || got.Cores != demand.Cores*gpu.Cores(demand.Cards) {
			t.Errorf("%+v: %d cores on each of %d cards", got, demand.Cores, demand.Cards)
		}
		if got.Request == 0 || got.Request > 1<<60 {
			return // Nothing to place, or sums saturate.
		}
		var where []int
		assignment := Assignment{Request: got.Request}
		for i := range demand.Cards {
			where = append(where, 3*i)
			assignment.Cards = append(assignment.Cards, AssignedCard{3 * i, demand.Memory})
		}
		for i := range pod.Spec.Containers {
			assignment.Containers = append(assignment.Containers, ContainerRequest(&pod.Spec.Containers[i]))
		}
		pod.ObjectMeta = metav1.ObjectMeta{Annotations: assignment.Annotations()}
		placement, err := PodPlacement(pod)
		if err != nil {
			t.Fatalf("%+v can't be read back from %v: %v", got, pod.Annotations, err)
		}
		expect(t, "read back", demand.On(where...), placement)
	})
}
