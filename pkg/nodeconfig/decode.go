package nodeconfig

import (
	"bufio"
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
)

// APIVersion and Kind identify the format. A new key needs no new version: a plugin that doesn't know it rejects the file.
const (
	APIVersion = "gpushare.aliyun.com/v1"
	Kind       = "NodeConfiguration"
)

// fileJSON is the format of a file.
type fileJSON struct {
	APIVersion    string          `json:"apiVersion"`
	Kind          string          `json:"kind"`
	MemoryUnit    *string         `json:"memoryUnit"`
	ExcludedCards []selectorJSON  `json:"excludedCards"`
	CardMemory    *cardMemoryJSON `json:"cardMemory"`
	Isolation     *string         `json:"isolation"`
	HealthChecks  struct {
		DisabledXids []intstr.IntOrString `json:"disabledXids"`
		EnabledXids  []intstr.IntOrString `json:"enabledXids"`
		QuietPeriod  *string              `json:"quietPeriod"`
	} `json:"healthChecks"`
}

type selectorJSON struct {
	Index *int   `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
}

type cardMemoryJSON struct {
	All    string            `json:"all"`
	ByUUID map[string]string `json:"byUUID"`
}

// examples has a correct value of each key, which follows each error about it.
var examples = map[string]string{
	"apiVersion":    "apiVersion: " + APIVersion,
	"kind":          "kind: " + Kind,
	"memoryUnit":    "memoryUnit: 256MiB",
	"excludedCards": "excludedCards: [{index: 0}, {uuid: GPU-8dcd427f-1a2b}, {model: NVIDIA T1000}]",
	"cardMemory":    "cardMemory: {all: 96Gi, byUUID: {GPU-8dcd427f-1a2b: 48Gi}}",
	"isolation":     "isolation: driver",
	"healthChecks":  "healthChecks: {disabledXids: [48, 63], enabledXids: [31], quietPeriod: 5m}",
}

// keyError is an error in the value of a key, such as healthChecks.quietPeriod.
type keyError struct {
	key string
	err error
}

func (e keyError) Error() string {
	top, _, _ := strings.Cut(e.key, ".")
	top, _, _ = strings.Cut(top, "[")
	if example, ok := examples[top]; ok {
		return fmt.Sprintf("%s: %v; for example %s", e.key, e.err, example)
	}
	return fmt.Sprintf("%s: %v; the keys are apiVersion, kind, memoryUnit, excludedCards, cardMemory, isolation and healthChecks", e.key, e.err)
}

func (e keyError) Unwrap() error { return e.err }

// Decode reads a file's content. What it doesn't give has its default. Unknown and repeated keys are errors, and keys are case-sensitive. The error names every
// wrong key, with an example of a correct value.
func Decode(data []byte) (Settings, error) {
	file, err := decode(data)
	if err != nil {
		return Settings{}, err
	}
	return file.parse()
}

func decode(data []byte) (file fileJSON, err error) {
	if hasSeveral(data) {
		return file, errors.New("it must have one YAML document")
	}
	text, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return file, err
	}
	strict, err := json.UnmarshalStrict(text, &file)
	if err != nil {
		// The standard library's error has the key. It ignores the case of keys, so it can't replace the strict decoder.
		wrong := (*stdjson.UnmarshalTypeError)(nil)
		if errors.As(stdjson.Unmarshal(text, &fileJSON{}), &wrong) {
			err = fmt.Errorf("it must have keys and values, got only a JSON %s", wrong.Value)
			if wrong.Field != "" {
				err = keyError{wrong.Field, fmt.Errorf("a value can't be a JSON %s here", wrong.Value)}
			}
		}
		return file, err
	}
	for i, e := range strict {
		if unknown := json.FieldError(nil); errors.As(e, &unknown) {
			strict[i] = keyError{unknown.FieldPath(), errors.New("unknown key")}
		}
	}
	return file, errors.Join(strict...)
}

// hasSeveral reports whether the data has several YAML documents. A YAML decoder would ignore all but the first.
func hasSeveral(data []byte) bool {
	documents := 0
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		document, err := reader.Read()
		if err != nil { // The end: a read from memory has no other error.
			return documents > 1
		}
		var content any
		if err := yaml.Unmarshal(document, &content); err != nil || content != nil {
			documents++
		}
	}
}

// parse checks and converts the values. It returns all errors.
func (f fileJSON) parse() (_ Settings, err error) {
	s, errs := Defaults(), []error(nil)
	check := func(key string, err error) {
		if err != nil {
			errs = append(errs, keyError{key, err})
		}
	}
	check("apiVersion", mustBe(f.APIVersion, APIVersion))
	check("kind", mustBe(f.Kind, Kind))
	if f.MemoryUnit != nil {
		s.Unit, err = gpu.ParseUnit(*f.MemoryUnit)
		check("memoryUnit", err)
	}
	for i, card := range f.ExcludedCards {
		selector, err := card.parse()
		check(fmt.Sprintf("excludedCards[%d]", i), err)
		s.Excluded = append(s.Excluded, selector)
	}
	if f.CardMemory != nil {
		s.CardMemory, err = inventory.NewCardMemory(f.CardMemory.All, f.CardMemory.ByUUID)
		check("cardMemory", err)
	}
	if f.Isolation != nil {
		s.Isolation, err = isolation.ParseMode(*f.Isolation)
		check("isolation", err)
	}
	s.Xids.Disabled, err = parseXids(f.HealthChecks.DisabledXids)
	check("healthChecks.disabledXids", err)
	s.Xids.Enabled, err = parseXids(f.HealthChecks.EnabledXids)
	check("healthChecks.enabledXids", err)
	if f.HealthChecks.QuietPeriod != nil {
		s.QuietPeriod, err = time.ParseDuration(*f.HealthChecks.QuietPeriod)
		if err == nil && s.QuietPeriod <= 0 {
			err = fmt.Errorf("must be positive, got %v", s.QuietPeriod)
		}
		check("healthChecks.quietPeriod", err)
	}
	if len(errs) > 0 {
		return Settings{}, errors.Join(errs...)
	}
	return s, nil
}

func mustBe(got, want string) error {
	if got != want {
		return fmt.Errorf("must be %s, got %q", want, got)
	}
	return nil
}

func (s selectorJSON) parse() (CardSelector, error) {
	given := 0
	for _, is := range []bool{s.Index != nil, s.UUID != "", s.Model != ""} {
		if is {
			given++
		}
	}
	switch {
	case given != 1:
		return CardSelector{}, fmt.Errorf("must have exactly one of index, uuid and model, got %d of them", given)
	case s.Index == nil:
		return CardSelector{UUID: s.UUID, Model: s.Model}, nil
	case *s.Index < 0:
		return CardSelector{}, fmt.Errorf("an index is at least 0, got %d", *s.Index)
	}
	return CardSelector{Index: *s.Index}, nil
}

// parseXids parses a list, which must have no unknown words, unlike a flag's.
func parseXids(list []intstr.IntOrString) (set inventory.XidSet, err error) {
	var words []string
	for _, x := range list {
		if x.Type == intstr.Int && x.IntVal < 1 {
			return set, fmt.Errorf("a Xid is a number above 0, got %d", x.IntVal)
		}
		words = append(words, x.String())
	}
	set, malformed := inventory.ParseXids(strings.Join(words, ","))
	if slices.Contains(words, "") {
		malformed = append(malformed, "")
	}
	if len(malformed) > 0 {
		return set, fmt.Errorf("%s is neither the number of a Xid nor all", strconv.Quote(malformed[0]))
	}
	return set, nil
}
