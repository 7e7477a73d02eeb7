package inspect

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestTableOnTerminal(t *testing.T) {
	tests := map[string]struct {
		objects func(*testing.T) Objects
		options TableOptions
		want    string
	}{
		"bars and the largest free request are right of the other columns": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 160}}, `
NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0        GPU1
cn-beijing.i-2ze       192.168.0.70  0/15                   0/0                    0/15             15                 ░░░░░░░░░░
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30             15                 ░░░░░░░░░░  ██████░░░░
---------------------------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"bars are as wide as the terminal allows": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 130}}, `
NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0  GPU1
cn-beijing.i-2ze       192.168.0.70  0/15                   0/0                    0/15             15                 ░░░░
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30             15                 ░░░░  ██░░
---------------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"in a narrow terminal bars replace figures": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 100}}, `
NAME                   IPADDRESS     GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0        GPU1
cn-beijing.i-2ze       192.168.0.70  0/15             15                 ░░░░░░░░░░
cn-shanghai.i-uf61h64  192.168.0.71  9/30             15                 ░░░░░░░░░░  ██████░░░░
-----------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"figures are kept if a bar of one character fits": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 123}}, `
NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  0  1
cn-beijing.i-2ze       192.168.0.70  0/15                   0/0                    0/15             15                 ·
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30             15                 ·  ▅
---------------------------------------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"figures are omitted if no bar fits": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 122}}, `
NAME                   IPADDRESS     GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0        GPU1
cn-beijing.i-2ze       192.168.0.70  0/15             15                 ░░░░░░░░░░
cn-shanghai.i-uf61h64  192.168.0.71  9/30             15                 ░░░░░░░░░░  ██████░░░░
-----------------------------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"the narrowest bar is one character": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 78}}, `
NAME                   IPADDRESS     GPU Memory(GiB)  LARGEST FREE(GiB)  0  1
cn-beijing.i-2ze       192.168.0.70  0/15             15                 ·
cn-shanghai.i-uf61h64  192.168.0.71  9/30             15                 ·  ▅
-----------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"addresses are omitted on a very narrow terminal": {twoNodes, TableOptions{Look: Look{Bars: true, Width: 76}}, `
NAME                   GPU Memory(GiB)  LARGEST FREE(GiB)  GPU0     GPU1
cn-beijing.i-2ze       0/15             15                 ░░░░░░░
cn-shanghai.i-uf61h64  9/30             15                 ░░░░░░░  ████░░░
---------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ████░░░░░░░░░░░░░░░░
`},
		"a terminal without Unicode": {twoNodes, TableOptions{Look: Look{Bars: true, ASCII: true, Width: 78}}, `
NAME                   IPADDRESS     GPU Memory(GiB)  LARGEST FREE(GiB)  0  1
cn-beijing.i-2ze       192.168.0.70  0/15             15                 .
cn-shanghai.i-uf61h64  192.168.0.71  9/30             15                 .  6
-----------------------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ####................
`},
		"wide keeps every figure": {twoNodes, TableOptions{Wide: true, Look: Look{Bars: true, ASCII: true, Width: 60}}, `
NAME                   IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  GPU Memory(GiB)  LARGEST FREE(GiB)  0  1  UNIT  MODEL  PROBLEMS
cn-beijing.i-2ze       192.168.0.70  0/15                   0/0                    0/15             15                 .     GiB   -      -
cn-shanghai.i-uf61h64  192.168.0.71  0/15                   9/15                   9/30             15                 .  6  GiB   -      -
------------------------------------------------------------
Largest Free Piece: 15 GiB of 36 GiB free, on cn-beijing.i-2ze and 1 other node
Allocated/Total GPU Memory In Cluster:
9/45 (20%)  ####................
`},
		"colors mark problems": {failing, TableOptions{Look: Look{Bars: true, Color: true, Width: 120}}, "\n" +
			bolds("NAME  ", "IPADDRESS  ", "GPU0(Allocated/Total)  ", "GPU1(Allocated/Total)  ", "GPU Memory(GiB)  ", "LARGEST FREE(GiB)  ", "GPU0       ", "GPU1") + `
n     10.0.0.1   18/16                  0/16                   18/32            0                  <R>█████████<0>  <R>xxxxxxxxx<0>
-----------------------------------------------------------------------------------------------------------------------
Largest Free Piece: none
Allocated/Total GPU Memory In Cluster:
18/32 (56%)  ███████████░░░░░░░░░

Problems:
NODE  PROBLEM
n     <R>GPU0 is oversubscribed: 18 of 16 (GiB)<0>
n     <R>GPU1 is unhealthy: Xid 79<0>
`},
		"rows for scripts don't depend on the terminal": {twoNodes, TableOptions{RowsOnly: true, Look: Look{Bars: true, Color: true, Width: 60}}, `
cn-beijing.i-2ze       192.168.0.70  0/15  0/0   0/15
cn-shanghai.i-uf61h64  192.168.0.71  0/15  9/15  9/30
`},
	}
	colors := strings.NewReplacer("<R>", "\x1b[31m", "<0>", "\x1b[0m")
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := WriteTable(&out, Build(test.objects(t)), test.options); err != nil {
				t.Fatal(err)
			}
			// The figures of unhealthy cards are red too. The table above omits this, to be easier to read.
			got := strings.NewReplacer("\x1b[31m18/16\x1b[0m", "18/16", "\x1b[31m0/16\x1b[0m", "0/16").Replace(out.String())
			if diff := cmp.Diff(colors.Replace(strings.TrimPrefix(test.want, "\n")), got); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
}

// bolds returns a header with each name in bold.
func bolds(names ...string) string {
	var out strings.Builder
	for _, name := range names {
		text := strings.TrimRight(name, " ")
		out.WriteString("\x1b[1m" + text + "\x1b[0m" + strings.Repeat(" ", len(name)-len(text)))
	}
	return out.String()
}

// failing returns a node with an oversubscribed card and an unhealthy one.
func failing(t *testing.T) Objects {
	return objects([]nodeBuilder{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 16), unhealthy(t4(1, 16), "Xid 79"))},
		newPod("over", 18).on("n", 0))
}

func TestDetailsOnTerminal(t *testing.T) {
	var out bytes.Buffer
	if err := WriteDetails(&out, Build(failing(t)), false, Look{Bars: true, ASCII: true}); err != nil {
		t.Fatal(err)
	}
	want := `NAME:       n
IPADDRESS:  10.0.0.1
UNIT:       GiB

GPU   UUID   MODEL     NUMA  ALLOCATED/TOTAL                        HEALTH
GPU0  GPU-0  Tesla T4  -     18/16            ####################  healthy
GPU1  GPU-1  Tesla T4  -     0/16             xxxxxxxxxxxxxxxxxxxx  unhealthy: Xid 79

NAME         NAMESPACE  GPU0(Allocated)  GPU1(Allocated)  STATUS
over         default    18               0                Running, GPU0 is oversubscribed
Allocated :  18 (56%)
Total :      32
Problems :   GPU0 is oversubscribed: 18 of 16 (GiB)
             GPU1 is unhealthy: Xid 79
-----------------------------------------------------------------------------------------

Largest Free Piece: none
Allocated/Total GPU Memory In Cluster:  18/32 (56%)
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

func TestLook(t *testing.T) {
	for name, test := range map[string]struct {
		color string
		env   map[string]string
		want  Look
	}{
		"a pipe gets plain text":              {colorAuto, nil, Look{}},
		"a pipe with --color=always":          {colorAlways, map[string]string{"NO_COLOR": "1"}, Look{Color: true, Bars: true}},
		"a pipe with --color=never":           {colorNever, nil, Look{}},
		"an old locale has no block elements": {colorAlways, map[string]string{"LANG": "zh_CN.GB18030"}, Look{Color: true, Bars: true, ASCII: true}},
		"a UTF-8 locale has":                  {colorAlways, map[string]string{"LANG": "C", "LC_ALL": "C.utf8"}, Look{Color: true, Bars: true}},
		"the most specific variable decides":  {colorAlways, map[string]string{"LANG": "C.UTF-8", "LC_CTYPE": "C"}, Look{Color: true, Bars: true, ASCII: true}},
	} {
		got := lookFor(&bytes.Buffer{}, test.color, func(name string) string { return test.env[name] })
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

// TestBar checks that a bar is empty only if nothing is allocated, and full only if nothing is free.
func TestBar(t *testing.T) {
	for _, test := range []struct {
		taken, total gpu.Memory
		columns      int
		want         string
	}{
		{0, 1000, 10, "░░░░░░░░░░"}, {1, 1000, 10, "█░░░░░░░░░"}, {500, 1000, 10, "█████░░░░░"},
		{999, 1000, 10, "█████████░"}, {1000, 1000, 10, "██████████"}, {2000, 1000, 10, "██████████"},
		{0, 0, 3, "░░░"}, {0, 16, 1, "·"}, {1, 16, 1, "▁"}, {15, 16, 1, "▇"}, {16, 16, 1, "█"},
	} {
		if got := (Look{}).bar(test.taken, test.total, test.columns); got != test.want {
			t.Errorf("%d of %d: %s, want %s", test.taken, test.total, got, test.want)
		}
	}
}

// TestColumnAlignment checks that columns are aligned for long names, wide characters and control characters.
func TestColumnAlignment(t *testing.T) {
	long := strings.Repeat("a-very-long-name.", 14) + "node" // 242 characters, of 253 allowed.
	var out bytes.Buffer
	writeRows(&out, Look{}, [][]cell{
		cells("NAME", "MODEL", "END"),
		cells("显存", "größe", "|"),
		cells("e\u0301te\u0301", "Ｗide", "|"),
		cells("a\u202eb\tc", "", "|"),
		cells(long, "x", "|"),
		cells("the last cell makes no column wider, however long it may be"),
	})
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	want := textWidth(strings.TrimSuffix(lines[0], "END"))
	for _, line := range lines[1:5] {
		if got := textWidth(strings.TrimSuffix(line, "|")); got != want {
			t.Errorf("the last column starts at %d, want %d: %s", got, want, line)
		}
	}
	if want != len(long)+gap+len("größe")-2+gap {
		t.Errorf("the last column starts at %d", want)
	}
	if strings.Contains(out.String(), "\u202e") {
		t.Error("a bidirectional control character was written")
	}
}

// manyNodes returns a large cluster of nodes with eight cards, a pod on each card, and pending pods.
func manyNodes(tb testing.TB, nodes, pending int) Objects {
	var out Objects
	t, _ := tb.(*testing.T)
	for i := range nodes {
		name := fmt.Sprintf("node-%04d", i)
		var cards []gpu.Card
		for c := range 8 {
			cards = append(cards, t4(c, 16276))
			out.Pods = append(out.Pods, newPod(fmt.Sprintf("pod-%04d-%d", i, c), 8138).on(name, c).Pod)
		}
		out.Nodes = append(out.Nodes, inventoryNode(t, name, "10.0.0.1", gpu.MiB, cards...).Node)
	}
	for i := range pending {
		out.Pods = append(out.Pods, newPod(fmt.Sprintf("waiting-%04d", i), 12000).Pod)
	}
	return out
}

func TestLargeCluster(t *testing.T) {
	report := Build(manyNodes(t, 1000, 100))
	var out bytes.Buffer
	if err := WriteTable(&out, report, TableOptions{Look: Look{Bars: true, Width: 120}}); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(out.String(), "\n"); lines != 1000+5+103 {
		t.Errorf("%d lines", lines)
	}
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "node-") && textWidth(strings.TrimSpace(line)) > 120 {
			t.Fatalf("too long for the terminal: %s", line)
		}
	}
	if got := report.PendingPods[0]; got.Cause != diagnosis.Fragmented ||
		got.Explanation != "65104 MiB free on node-0000, but the largest piece is 8138 MiB (and 999 nodes alike): a pod gets one card" {
		t.Errorf("diagnosis: %s, %s", got.Cause, got.Explanation)
	}
}

func BenchmarkLargeCluster(b *testing.B) {
	objects := manyNodes(b, 1000, 100)
	for b.Loop() {
		var out bytes.Buffer
		if err := WriteTable(&out, Build(objects), TableOptions{Look: Look{Bars: true, Width: 120}}); err != nil {
			b.Fatal(err)
		}
	}
}
