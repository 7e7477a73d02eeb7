package deviceplugin

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

var update = flag.Bool("update", false, "write the tables of docs/units.md")

const (
	unitsPage  = "../../docs/units.md"
	unitsStart = "<!-- tables: written by go test ./pkg/deviceplugin -run TestUnitsPage -update -->\n"
	unitsEnd   = "<!-- end of tables -->\n"
)

// TestUnitsPage computes the tables of docs/units.md from the code, so that the page matches the code.
func TestUnitsPage(t *testing.T) {
	page, err := os.ReadFile(unitsPage)
	check.Must(t, err)
	before, rest, ok := strings.Cut(string(page), unitsStart)
	tables, after, ended := strings.Cut(rest, unitsEnd)
	if !ok || !ended {
		t.Fatalf("%s has no place for the tables", unitsPage)
	}
	want := unitTables(t)
	if *update {
		check.Must(t, os.WriteFile(unitsPage, []byte(before+unitsStart+want+unitsEnd+after), 0o644))
		return
	}
	if diff := cmp.Diff(want, tables); diff != "" {
		t.Errorf("%s isn't up to date (-want +got)\n%s", unitsPage, diff)
	}
}

func unitTables(t *testing.T) string {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	units := []gpu.Unit{gpu.GiB, 256 * gpu.MiB, gpu.MiB}
	sizes := []uint64{16, 24, 40, 80, 141}

	line("\n| cards of the node | GiB | 256MiB | MiB | smallest unit that fits |\n| --- | --- | --- | --- | --- |")
	for _, size := range sizes {
		for _, count := range []int{1, 4, 8} {
			row := fmt.Sprintf("| %d x %d GiB |", count, size)
			var finest protocol.Inventory
			for _, unit := range units {
				finest = protocol.Inventory{Unit: unit, Cards: newCards(slices.Repeat([]gpu.Memory{unit.Count(size << 30)}, count)...)}
				bytes := messageSize(finest.Cards)
				if all := allUnhealthy(finest.Cards); bytes <= maxMessage && bytes != int64(proto.Size(&pluginapi.ListAndWatchResponse{Devices: devices(all)})) {
					t.Errorf("%d cards of %d GiB in %s: the message isn't %d bytes long", count, size, unit, bytes)
				}
				row += fmt.Sprintf(" %s devices, %s", thousands(int64(len(finest.Cards))*int64(finest.Cards[0].Memory)), inBytes(bytes))
				if bytes > maxMessage {
					row += " **too large**"
				}
				row += " |"
			}
			line("%s %s |", row, smallestUnit(finest))
		}
	}
	line("\n| a pod that asks for | GiB | 256MiB | MiB |\n| --- | --- | --- | --- |")
	for _, size := range sizes {
		row := fmt.Sprintf("| %d GiB |", size)
		for _, unit := range units {
			entries := int64(unit.Count(size << 30))
			row += fmt.Sprintf(" %s entries, %s |", thousands(entries), inBytes(statusSize(t, gpu.Memory(entries))))
		}
		line("%s", row)
	}
	line("")
	return out.String()
}

// allUnhealthy returns copies of the cards, all of them unhealthy.
func allUnhealthy(cards []gpu.Card) []gpu.Card {
	cards = slices.Clone(cards)
	for i := range cards {
		cards[i].Unhealthy = "Xid 79"
	}
	return cards
}

// statusSize returns how many bytes of JSON the kubelet adds to the status of a pod that holds this many units of a card.
func statusSize(t *testing.T, units gpu.Memory) int64 {
	t.Helper()
	status := corev1.ResourceStatus{Name: protocol.ResourceMemory}
	for unit := range units {
		status.Resources = append(status.Resources, corev1.ResourceHealth{
			ResourceID: corev1.ResourceID(deviceID(0, unit)), Health: corev1.ResourceHealthStatusHealthy,
		})
	}
	data, err := json.Marshal(map[string]any{"allocatedResourcesStatus": []corev1.ResourceStatus{status}})
	check.Must(t, err)
	return int64(len(data))
}

func thousands(n int64) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func inBytes(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
