package inspect

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// TestExample compares the example of JSON in docs/inspect.md with the output for the cluster that it shows. There "…" stands for any text.
func TestExample(t *testing.T) {
	page, err := os.ReadFile("../../docs/inspect.md")
	check.Must(t, err)
	_, section, _ := strings.Cut(string(page), "\n## The structure behind `-o json`\n")
	begin, end := strings.Index(section, "    {\n"), strings.Index(section, "\n    }\n")
	if begin < 0 || end < begin {
		t.Fatal("docs/inspect.md has no example")
	}
	var want, got any
	check.Must(t, json.Unmarshal([]byte(section[begin:end+len("\n    }\n")]), &want))
	twoCards := newPod("p", 18).bound("n1").with(func(p *corev1.Pod) {
		p.Labels = map[string]string{protocol.LabelCount: "2"}
		p.Annotations = protocol.Assignment{
			Cards: []protocol.AssignedCard{{Index: 0, Memory: 15}, {Index: 1, Memory: 15}}, Request: 18, AssumeTime: time.Unix(7, 0), Assigned: true, AssignTime: time.Unix(7, 0),
		}.Annotations()
	})
	pending := newPod("q", 8).refused("0/2 nodes are available: 1 no GPU card has enough free memory, though the node's cards together have, 1 Insufficient aliyun.com/gpu-mem.")
	pending.CreationTimestamp = metav1.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	misspelt := newPod("r", 0).plain().bound("n1")
	misspelt.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"aliyun.com/gpumem": *resource.NewQuantity(4, resource.DecimalSI)}
	o := objects([]nodeBuilder{
		inventoryNode(t, "n1", "10.0.0.7", gpu.GiB, t4(0, 15), t4(1, 15)), plainNode("n2", "10.0.0.8").labelled(protocol.LabelShared, "true"),
	}, twoCards, pending, misspelt)
	var text bytes.Buffer
	check.Must(t, writeStructured(&text, "json", Build(o)))
	check.Must(t, json.Unmarshal(text.Bytes(), &got))
	if diff := cmp.Diff(want, shortened(got, want)); diff != "" {
		t.Errorf("docs/inspect.md and the output (-page +output):\n%s\nThe output is %s", diff, text.String())
	}
}

// shortened returns the value of the output, with the page's texts where the page shortens them.
func shortened(output, page any) any {
	switch page := page.(type) {
	case map[string]any:
		if object, ok := output.(map[string]any); ok {
			for key := range object {
				object[key] = shortened(object[key], page[key])
			}
		}
	case []any:
		if list, ok := output.([]any); ok {
			for i := range min(len(list), len(page)) {
				list[i] = shortened(list[i], page[i])
			}
		}
	case string:
		text, ok := output.(string)
		if before, after, cut := strings.Cut(page, "…"); ok && cut && strings.HasPrefix(text, before) && strings.HasSuffix(text, after) {
			return page
		}
	}
	return output
}
