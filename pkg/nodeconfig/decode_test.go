package nodeconfig

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/test/check"
)

const header = "apiVersion: gpushare.aliyun.com/v1\nkind: NodeConfiguration\n"

// exported compares the values of package inventory too.
var exported = cmp.AllowUnexported(inventory.CardMemory{}, inventory.XidSet{})

func xids(list string) inventory.XidSet {
	set, _ := inventory.ParseXids(list)
	return set
}

func memory(t *testing.T, text string) inventory.CardMemory {
	t.Helper()
	m, err := inventory.ParseCardMemory(text)
	check.Must(t, err)
	return m
}

func TestDecode(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want func(*Settings)
	}{
		"no values": {"", func(*Settings) {}},
		"every key": {`
memoryUnit: 256MiB
excludedCards:
- index: 0
- uuid: GPU-a
- model: NVIDIA T1000
cardMemory:
  byUUID: {GPU-a: 48Gi, GPU-b: 96Gi}
isolation: driver
healthChecks:
  disabledXids: [48, "63"]
  enabledXids: [all]
  quietPeriod: 90s
`, func(s *Settings) {
			s.Unit, s.QuietPeriod, s.Isolation = 256*gpu.MiB, 90*time.Second, isolation.Driver
			s.Excluded = Cards{{Index: 0}, {UUID: "GPU-a"}, {Model: "NVIDIA T1000"}}
			s.CardMemory = memory(t, "GPU-a=48Gi,GPU-b=96Gi")
			s.Xids = inventory.XidChecks{Disabled: xids("48,63"), Enabled: xids("all")}
		}},
		"the memory of all cards":              {"cardMemory: {all: 96Gi}", func(s *Settings) { s.CardMemory = memory(t, "96Gi") }},
		"a document marker before and a blank": {"---\n" + "memoryUnit: MiB\n\n", func(s *Settings) { s.Unit = gpu.MiB }},
	} {
		t.Run(name, func(t *testing.T) {
			text := header + test.text
			if rest, ok := strings.CutPrefix(test.text, "---\n"); ok {
				text = "---\n" + header + rest
			}
			got, err := Decode([]byte(text))
			check.Must(t, err)
			want := Defaults()
			test.want(&want)
			check.Equal(t, "the result", want, got, exported)
		})
	}
}

func TestDecodeErrors(t *testing.T) {
	const (
		unit   = "; for example memoryUnit: 256MiB"
		cards  = "; for example excludedCards: [{index: 0}, {uuid: GPU-8dcd427f-1a2b}, {model: NVIDIA T1000}]"
		sizes  = "; for example cardMemory: {all: 96Gi, byUUID: {GPU-8dcd427f-1a2b: 48Gi}}"
		health = "; for example healthChecks: {disabledXids: [48, 63], enabledXids: [31], quietPeriod: 5m}"
		keys   = "; the keys are apiVersion, kind, memoryUnit, excludedCards, cardMemory, isolation and healthChecks"
	)
	for name, test := range map[string]struct{ text, want string }{
		"nothing": {"", `apiVersion: must be gpushare.aliyun.com/v1, got ""; for example apiVersion: gpushare.aliyun.com/v1` + "\n" +
			`kind: must be NodeConfiguration, got ""; for example kind: NodeConfiguration`},
		"only words":             {"memoryUnit", "it must have keys and values, got only a JSON string"},
		"a list":                 {"- memoryUnit", "it must have keys and values, got only a JSON array"},
		"no YAML":                {"memoryUnit: [", "yaml: line 1: did not find expected node content"},
		"another version":        {"apiVersion: gpushare.aliyun.com/v2\nkind: NodeConfiguration", `apiVersion: must be gpushare.aliyun.com/v1, got "gpushare.aliyun.com/v2"; for example apiVersion: gpushare.aliyun.com/v1`},
		"several":                {header + "---\nmemoryUnit: MiB", "it must have one YAML document"},
		"an unknown key":         {header + "memoryUnits: MiB", "memoryUnits: unknown key" + keys},
		"another case":           {header + "memoryunit: MiB", "memoryunit: unknown key" + keys},
		"an unknown inner":       {header + "healthChecks: {xids: [48]}", "healthChecks.xids: unknown key" + health},
		"an unknown item":        {header + "excludedCards: [{name: a}]", "excludedCards[0].name: unknown key" + cards},
		"a key twice":            {header + "memoryUnit: MiB\nmemoryUnit: GiB", "yaml: unmarshal errors:\n  line 4: key \"memoryUnit\" already set in map"},
		"a wrong isolation mode": {header + "isolation: vgpu", `isolation: isolation mode "vgpu": want none, driver or mps; for example isolation: driver`},
		"a wrong unit":           {header + "memoryUnit: GB", `memoryUnit: memory unit "GB": want GiB, MiB, or a number of them such as 256MiB` + unit},
		"a number as unit":       {header + "memoryUnit: 256", "memoryUnit: a value can't be a JSON number here" + unit},
		"no selector":            {header + "excludedCards: [{}]", "excludedCards[0]: must have exactly one of index, uuid and model, got 0 of them" + cards},
		"two selectors":          {header + "excludedCards: [{index: 0}, {index: 1, model: T4}]", "excludedCards[1]: must have exactly one of index, uuid and model, got 2 of them" + cards},
		"a negative index":       {header + "excludedCards: [{index: -1}]", "excludedCards[0]: an index is at least 0, got -1" + cards},
		"an index as text":       {header + "excludedCards: [{index: one}]", "excludedCards.index: a value can't be a JSON string here" + cards},
		"bare indices":           {header + "excludedCards: [0, 1]", "excludedCards: a value can't be a JSON number here" + cards},
		"no size":                {header + "cardMemory: {all: much}", `cardMemory: size "much": want one such as 96Gi`},
		"a size for all":         {header + "cardMemory: 96Gi", "cardMemory: a value can't be a JSON string here" + sizes},
		"size zero":              {header + "cardMemory: {byUUID: {GPU-a: 0Gi}}", "cardMemory: GPU-a: a size must be positive" + sizes},
		"no Xid":                 {header + "healthChecks: {disabledXids: [48, x]}", `healthChecks.disabledXids: "x" is neither the number of a Xid nor all` + health},
		"Xid 0":                  {header + "healthChecks: {enabledXids: [0]}", "healthChecks.enabledXids: a Xid is a number above 0, got 0" + health},
		"a list as text":         {header + "healthChecks: {enabledXids: \"48,63\"}", "healthChecks.enabledXids: a value can't be a JSON string here" + health},
		"no unit of time":        {header + "healthChecks: {quietPeriod: \"5\"}", `healthChecks.quietPeriod: time: missing unit in duration "5"` + health},
		"no time":                {header + "healthChecks: {quietPeriod: 0s}", "healthChecks.quietPeriod: must be positive, got 0s" + health},
		"several mistakes":       {header + "memoryUnit: x\nexcludedCards: [{}]", `memoryUnit: memory unit "x": want GiB, MiB, or a number of them such as 256MiB` + unit + "\nexcludedCards[0]: must"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode([]byte(test.text))
			if err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
		})
	}
}

// TestExamplesDecode: the examples in errors are correct.
func TestExamplesDecode(t *testing.T) {
	var text []string
	for _, example := range examples {
		text = append(text, example)
	}
	if c, err := Decode([]byte(strings.Join(text, "\n"))); err != nil || len(c.Excluded) != 3 || c.Isolation != isolation.Driver {
		t.Errorf("%+v, %v", c, err)
	}
}

// FuzzDecode: whatever is decoded without an error is within its bounds, and decoding it again gives the same.
func FuzzDecode(f *testing.F) {
	for _, example := range examples {
		f.Add(header + example)
	}
	f.Add(header + "---\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Decode([]byte(text))
		if err != nil {
			if diff := cmp.Diff(Settings{}, s, exported); diff != "" {
				t.Errorf("values beside the error %v: %s", err, diff)
			}
			return
		}
		if s.Unit <= 0 || s.QuietPeriod <= 0 {
			t.Errorf("unit %d, quiet period %v", s.Unit, s.QuietPeriod)
		}
		for _, card := range s.Excluded {
			if card.Index < 0 {
				t.Errorf("index %d", card.Index)
			}
		}
		inJSON, err := yaml.YAMLToJSON([]byte(text))
		check.Must(t, err)
		again, err := Decode(inJSON)
		if diff := cmp.Diff(s, again, exported); err != nil || diff != "" {
			t.Errorf("the same in JSON: %v\n%s", err, diff)
		}
	})
}
