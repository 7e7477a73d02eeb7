package inspect

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// TestAdapters: JSON has the adapters, sorted by name, and the details of a node the ports near each card.
func TestAdapters(t *testing.T) {
	report := Build(withAdapters(t))
	var details, structured bytes.Buffer
	writeDetails(&details, report, format{wide: true})
	check.Must(t, writeStructured(&structured, "json", report))
	for _, line := range []string{
		"GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL  RDMA      HEALTH\n",
		"GPU0  GPU-0  Tesla T4  -     0/16             mlx5_1:1  healthy\n",
		"GPU1  GPU-1  Tesla T4  -     0/16             -         healthy\n",
		"GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL  HEALTH\n",
	} {
		if !strings.Contains(details.String(), line) {
			t.Errorf("details lack %q:\n%s", line, &details)
		}
	}
	text := strings.Join(strings.Fields(structured.String()), "")
	for _, part := range []string{
		`"rdmaPorts":"mlx5_1:1"`,
		`"adapters":[{"name":"mlx5_0","device":"uverbs0","numaNode":-1},` +
			`{"name":"mlx5_1","device":"uverbs1","activePorts":[1],"linkLayer":"Ethernet","pciAddress":"0000:3b:00.0","numaNode":1}]`,
	} {
		if strings.Count(text, part) != 1 {
			t.Errorf("JSON lacks %s, or has it twice:\n%s", part, &structured)
		}
	}
}
