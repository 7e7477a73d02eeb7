package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

var (
	assumed  = time.Unix(1700000000, 123456789)
	assigned = time.Unix(1700000001, 987654321)
)

func TestAssignmentAnnotations(t *testing.T) {
	atBind := map[string]string{
		"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "8138", "ALIYUN_COM_GPU_MEM_DEV": "16276",
		"ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000123456789", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
	}
	unknownTime := maps.Clone(atBind)
	unknownTime["ALIYUN_COM_GPU_MEM_ASSUME_TIME"] = "0"
	onNode := maps.Clone(atBind)
	onNode["ALIYUN_COM_GPU_MEM_ASSIGNED"], onNode["ALIYUN_COM_GPU_MEM_ASSIGN_TIME"] = "true", "1700000001987654321"
	patched := maps.Clone(atBind)
	maps.Copy(patched, AssignedAnnotations(assigned))
	expect(t, "the extender's annotations with those of the node", onNode, patched)
	for name, tc := range map[string]struct {
		in   Assignment
		want map[string]string
	}{
		"at bind":                   {Assignment{Cards: []AssignedCard{{1, 16276}}, Request: 8138, AssumeTime: assumed}, atBind},
		"once the card is assigned": {Assignment{Cards: []AssignedCard{{1, 16276}}, Request: 8138, AssumeTime: assumed, Assigned: true, AssignTime: assigned}, onNode},
		"several cards": {
			Assignment{Cards: []AssignedCard{{3, 16}, {0, 24}}, Request: 12, Containers: []gpu.Memory{8, 0, 4}, AssumeTime: assumed},
			map[string]string{
				"ALIYUN_COM_GPU_MEM_IDX": "3,0", "ALIYUN_COM_GPU_MEM_POD": "12", "ALIYUN_COM_GPU_MEM_DEV": "16,24",
				"ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000123456789", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
				"scheduler.framework.gpushare.allocation": `{"0":{"0":4,"3":4},"2":{"0":2,"3":2}}`,
			},
		},
		"an unknown time": {Assignment{Cards: []AssignedCard{{1, 16276}}, Request: 8138}, unknownTime},
	} {
		expect(t, name+": written", tc.want, tc.in.Annotations())
		again, err := ParseAssignment(tc.want)
		tc.in.Containers = nil // Not read.
		expect(t, name+": read back", tc.in, again)
		expect(t, name+": error", "", message(err))
	}
}

func TestParseAssignment(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations map[string]string
		want        Assignment
		err         string
	}{
		"no annotations":         {err: "the pod has no card assignment"},
		"a request alone":        {annotations: map[string]string{AnnotationPod: "8"}, err: "the pod has no card assignment"},
		"a card alone":           {annotations: map[string]string{AnnotationIndex: "1"}, want: Assignment{Cards: []AssignedCard{{1, 0}}}},
		"a card with spaces":     {annotations: map[string]string{AnnotationIndex: " 1 "}, want: Assignment{Cards: []AssignedCard{{1, 0}}}},
		"no card":                {annotations: map[string]string{AnnotationIndex: ""}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: "" is not a card index`},
		"no number":              {annotations: map[string]string{AnnotationIndex: "GPU-1"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: "GPU-1" is not a card index`},
		"a negative card":        {annotations: map[string]string{AnnotationIndex: "-1"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: "-1" is not a card index`},
		"the largest card index": {annotations: map[string]string{AnnotationIndex: "65536"}, want: Assignment{Cards: []AssignedCard{{65536, 0}}}},
		"a card index too large": {annotations: map[string]string{AnnotationIndex: "65537"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: "65537" is not a card index`},
		"several cards":          {annotations: map[string]string{AnnotationIndex: "0, 1", AnnotationDevice: "16,24"}, want: Assignment{Cards: []AssignedCard{{0, 16}, {1, 24}}}},
		"several cards with another number of amounts": {
			annotations: map[string]string{AnnotationIndex: "0,1", AnnotationDevice: "16"}, want: Assignment{Cards: []AssignedCard{{0, 0}, {1, 0}}},
		},
		"a card twice":   {annotations: map[string]string{AnnotationIndex: "0,1,0"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: card 0 is listed twice`},
		"a missing card": {annotations: map[string]string{AnnotationIndex: "0,"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: "" is not a card index`},
		"too many cards": {annotations: map[string]string{AnnotationIndex: strings.Repeat("0,", 64) + "0"}, err: `annotation ALIYUN_COM_GPU_MEM_IDX: 65 cards, want 64 at most`},
		"invalid amounts and times are unknown": {
			annotations: map[string]string{
				AnnotationIndex: "2", AnnotationPod: "much", AnnotationDevice: "-1", AnnotationAssumeTime: "yesterday",
				AnnotationAssigned: "yes", AnnotationAssignTime: "-5",
			},
			want: Assignment{Cards: []AssignedCard{{2, 0}}},
		},
		"amounts and times past 64 bits are unknown": {
			annotations: map[string]string{AnnotationIndex: "2", AnnotationPod: "18446744073709551616", AnnotationAssumeTime: "18446744073709551616"},
			want:        Assignment{Cards: []AssignedCard{{2, 0}}},
		},
	} {
		got, err := ParseAssignment(tc.annotations)
		expect(t, name, tc.want, got)
		expect(t, name+": error", tc.err, message(err))
	}
	if _, err := ParseAssignment(nil); !errors.Is(err, ErrNotAssumed) {
		t.Errorf("got %v, want ErrNotAssumed", err)
	}
	_, err := ParseAssignment(map[string]string{AnnotationIndex: strings.Repeat("9", 1<<16)})
	if err == nil || errors.Is(err, ErrNotAssumed) || len(err.Error()) > 200 {
		t.Errorf("a huge index: got an error of %d bytes, want a short one of its own", len(message(err)))
	}
}

func TestPodPlacement(t *testing.T) {
	const allocation = "annotation scheduler.framework.gpushare.allocation: "
	for name, tc := range map[string]struct {
		index, allocation string // "" leaves the annotation out.
		cores, init       string // Of the first container, and of an init container.
		want              gpu.Placement
		err               string
	}{
		"neither":                          {err: "the pod has no card assignment"},
		"a card":                           {index: "1", want: gpu.On(1, 8)},
		"an invalid card":                  {index: "x", err: `annotation ALIYUN_COM_GPU_MEM_IDX: "x" is not a card index`},
		"an allocation on one card":        {allocation: `{"0":{"1":8}}`, want: gpu.On(1, 8)},
		"containers add up on one card":    {allocation: `{"0":{"1":6},"1":{"1":2}}`, want: gpu.On(1, 8)},
		"an allocation over several cards": {allocation: `{"0":{"3":6},"1":{"1":2}}`, want: gpu.Placement{{Card: 1, Memory: 2}, {Card: 3, Memory: 6}}},
		"one container over several cards": {allocation: `{"0":{"0":4,"1":4}}`, want: gpu.Placement{{Card: 0, Memory: 4}, {Card: 1, Memory: 4}}},
		"a list of cards beside an allocation": {
			index: "0,1", allocation: `{"0":{"0":4,"1":4}}`, want: gpu.Placement{{Card: 0, Memory: 4}, {Card: 1, Memory: 4}},
		},
		"bind's card takes precedence over a forged allocation":   {index: "1", allocation: `{"0":{"5":8}}`, want: gpu.On(1, 8)},
		"bind's card takes precedence over an invalid allocation": {index: "1", allocation: `{`, want: gpu.On(1, 8)},
		"a forged smaller amount is ignored":                      {allocation: `{"0":{"1":1}}`, want: gpu.On(1, 8)},
		"a forged larger amount is ignored":                       {allocation: `{"0":{"1":9000}}`, want: gpu.On(1, 8)},
		"several cards with less than the request":                {allocation: `{"0":{"0":1,"1":1}}`, err: allocation + "2 in total, the pod requests 8"},
		"several cards with more than the request":                {allocation: `{"0":{"0":8,"1":8}}`, err: allocation + "16 in total, the pod requests 8"},
		"a sum past 64 bits": {
			allocation: `{"0":{"0":9223372036854775807},"1":{"0":9223372036854775807},"2":{"1":10}}`,
			err:        allocation + "9223372036854775807 in total, the pod requests 8",
		},
		"a share of nothing isn't one":                  {allocation: `{"0":{"0":0,"1":8}}`, want: gpu.On(1, 8)},
		"an allocation of nothing":                      {allocation: `{"0":{"0":0}}`, err: "the pod has no card assignment"},
		"an empty allocation":                           {allocation: `{}`, err: "the pod has no card assignment"},
		"an allocation that is null":                    {allocation: `null`, err: "the pod has no card assignment"},
		"an allocation with a negative":                 {allocation: `{"0":{"0":-1}}`, err: allocation + "negative memory on card 0"},
		"an allocation of a negative card":              {allocation: `{"0":{"-1":8}}`, err: allocation + `"-1" is not a card index`},
		"an allocation that isn't an object":            {allocation: `[1]`, err: allocation + "json: cannot unmarshal array into Go value of type map[string]map[string]int64"},
		"an allocation that is cut off":                 {allocation: `{"0":{"0":8}`, err: allocation + "unexpected end of JSON input"},
		"a list of cards and no allocation":             {index: "2,0", want: gpu.Placement{{Card: 0, Memory: 4}, {Card: 2, Memory: 4}}},
		"a list of cards and an empty allocation":       {index: "2,0", allocation: `{}`, want: gpu.Placement{{Card: 0, Memory: 4}, {Card: 2, Memory: 4}}},
		"a list of cards that don't divide the request": {index: "0,1,2", err: `annotation ALIYUN_COM_GPU_MEM_IDX: 3 cards, the request is 8`},
		"a list of cards beside an invalid allocation":  {index: "0,1", allocation: `{"0":{"0":1,"1":1}}`, err: allocation + "2 in total, the pod requests 8"},
		"keys that are names of containers":             {allocation: `{"main":{"0":3,"1":3},"side":{"0":1,"1":1}}`, want: gpu.Placement{{Card: 0, Memory: 4}, {Card: 1, Memory: 4}}},
		"cores on one card":                             {index: "1", cores: "30", want: gpu.Placement{{Card: 1, Memory: 8, Cores: 30}}},
		"cores on several cards": {
			index: "0,1", allocation: `{"0":{"0":4,"1":4}}`, cores: "60", want: gpu.Placement{{Card: 0, Memory: 4, Cores: 30}, {Card: 1, Memory: 4, Cores: 30}},
		},
		"cores that the cards don't divide are rounded up": {
			allocation: `{"0":{"0":4,"1":4}}`, cores: "61", want: gpu.Placement{{Card: 0, Memory: 4, Cores: 31}, {Card: 1, Memory: 4, Cores: 31}},
		},
		"initialization that needs more than the containers": {
			index: "0,1", allocation: `{"0":{"0":3,"1":3},"1":{"0":1,"1":1}}`, init: "12", want: gpu.Placement{{Card: 0, Memory: 6}, {Card: 1, Memory: 6}},
		},
		"an uneven allocation beside initialization that needs more": {
			allocation: `{"0":{"0":2,"1":6}}`, init: "12", err: allocation + "8 in total, the pod requests 12",
		},
		"initialization that can't be divided over the cards": {
			allocation: `{"0":{"0":4,"1":4}}`, init: "13", err: allocation + "8 in total, the pod requests 13",
		},
	} {
		t.Run(name, func(t *testing.T) {
			annotations := map[string]string{
				AnnotationPod: "1", AnnotationDevice: "1", // Forged: both are ignored.
			}
			if tc.index != "" {
				annotations[AnnotationIndex] = tc.index
			}
			if tc.allocation != "" {
				annotations[AnnotationAllocation] = tc.allocation
			}
			pod := annotated(annotations, asks("6"), asks("2"))
			if tc.cores != "" {
				pod.Spec.Containers[0].Resources.Limits[ResourceCores] = resource.MustParse(tc.cores)
			}
			if tc.init != "" {
				pod.Spec.InitContainers = []corev1.Container{asks(tc.init)}
			}
			got, err := PodPlacement(pod)
			for i := range tc.want {
				tc.want[i].Containers = 2 // Each counts on all cards.
			}
			expect(t, "placement", tc.want, got)
			expect(t, "error", tc.err, message(err))
			expect(t, "ErrNotAssumed", tc.err == ErrNotAssumed.Error(), errors.Is(err, ErrNotAssumed))
		})
	}
	var syntax *json.SyntaxError
	if _, err := PodPlacement(annotated(map[string]string{AnnotationAllocation: "{"})); !errors.As(err, &syntax) {
		t.Errorf("got %v, want it to wrap encoding/json's error", err)
	}
}

func TestContainerEnv(t *testing.T) {
	env := ContainerEnv{
		Cards:     []gpu.Card{{Index: 1, UUID: "GPU-1", Memory: 16276}},
		VisibleAs: []string{"GPU-1"}, PodRequest: 8138, ContainerRequest: 4069,
	}
	want := map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "GPU-1", "ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "8138",
		"ALIYUN_COM_GPU_MEM_DEV": "16276", "ALIYUN_COM_GPU_MEM_CONTAINER": "4069",
	}
	expect(t, "variables", want, env.Variables())
	env.DisableIsolation, want["CGPU_DISABLE"] = true, "true"
	expect(t, "without isolation", want, env.Variables())
	several := ContainerEnv{
		Cards: []gpu.Card{{Index: 3, Memory: 16}, {Index: 0, Memory: 24}}, VisibleAs: []string{"GPU-3", "GPU-0"}, PodRequest: 12, ContainerRequest: 8,
	}
	expect(t, "several cards", map[string]string{
		"NVIDIA_VISIBLE_DEVICES": "GPU-3,GPU-0", "ALIYUN_COM_GPU_MEM_IDX": "3,0", "ALIYUN_COM_GPU_MEM_POD": "12",
		"ALIYUN_COM_GPU_MEM_DEV": "16,24", "ALIYUN_COM_GPU_MEM_CONTAINER": "4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
	}, several.Variables())
	several.ContainerCores = 60
	expect(t, "cores", "30", several.Variables()["ALIYUN_COM_GPU_CORE_CONTAINER"])
	expect(t, "cores, read back", gpu.Cores(30), CoresOf(several.Variables()))
	for _, text := range []string{"", "-1", "much", "9223372036854775808"} {
		expect(t, "cores "+text, gpu.Cores(0), CoresOf(map[string]string{EnvCores: text}))
	}
}

// FuzzParseAssignment checks for arbitrary annotations that the result is within bounds and survives a round trip.
func FuzzParseAssignment(f *testing.F) {
	f.Fuzz(func(t *testing.T, index, request, device, assumeTime, assigned, assignTime string) {
		got, err := ParseAssignment(map[string]string{
			AnnotationIndex: index, AnnotationPod: request, AnnotationDevice: device,
			AnnotationAssumeTime: assumeTime, AnnotationAssigned: assigned, AnnotationAssignTime: assignTime,
		})
		if err != nil {
			if !strings.HasPrefix(err.Error(), "annotation "+AnnotationIndex+": ") || errors.Is(err, ErrNotAssumed) {
				t.Errorf("index %q: the error doesn't say which annotation is wrong: %v", index, err)
			}
			expect(t, "beside an error", Assignment{}, got)
			return
		}
		seen := map[int]bool{}
		for _, card := range got.Cards {
			if card.Index < 0 || card.Index > maxCard || card.Memory < 0 || seen[card.Index] {
				t.Errorf("out of bounds, or twice: %+v", got)
			}
			seen[card.Index] = true
		}
		if len(got.Cards) == 0 || len(got.Cards) > gpu.MaxCards || got.Request < 0 {
			t.Errorf("out of bounds: %+v", got)
		}
		if !got.Assigned {
			got.AssignTime = time.Time{} // Written only if Assigned is true.
		}
		again, err := ParseAssignment(got.Annotations())
		if err != nil {
			t.Fatalf("%+v can't be read back: %v", got, err)
		}
		expect(t, "read back", got, again)
	})
}

// FuzzPodPlacement checks for arbitrary annotations that a placement's total is the request of the spec, that its cards
// are distinct and in order, and that it survives a round trip through AnnotationAllocation.
func FuzzPodPlacement(f *testing.F) {
	f.Fuzz(func(t *testing.T, index, allocation string, request int64) {
		pod := annotated(map[string]string{AnnotationIndex: index, AnnotationAllocation: allocation}, asks(fmt.Sprint(request)))
		pod.Spec.InitContainers = []corev1.Container{asks(fmt.Sprint(request / 2))}
		got, err := PodPlacement(pod)
		if err != nil {
			if !errors.Is(err, ErrNotAssumed) && !strings.HasPrefix(err.Error(), "annotation ") {
				t.Errorf("the error doesn't say what is wrong: %v", err)
			}
			if got != nil {
				t.Errorf("the placement %v beside the error %v", got, err)
			}
			return
		}
		if len(got) == 0 || got.Total() != PodRequest(pod) {
			t.Errorf("%v holds %d, the pod asks for %d", got, got.Total(), PodRequest(pod))
		}
		shares := map[string]gpu.Memory{}
		for i, share := range got {
			if share.Card < 0 || share.Card > maxCard || share.Memory < 0 || i > 0 && share.Card <= got[i-1].Card {
				t.Errorf("%+v is out of bounds or out of order", got)
			}
			shares[fmt.Sprint(share.Card)] = share.Memory
		}
		if got.Total() == 0 {
			return // An empty allocation names no card.
		}
		text, err := json.Marshal(map[string]map[string]gpu.Memory{"0": shares})
		check.Must(t, err)
		pod.Annotations = map[string]string{AnnotationAllocation: string(text)}
		again, err := PodPlacement(pod)
		if err != nil {
			t.Fatalf("%s can't be read back: %v", text, err)
		}
		expect(t, "read back", got, again)
	})
}
