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

// Decode reads a file's content. Unknown and repeated keys are errors, and keys are case-sensitive. The error names every
// wrong key, with an example of a correct value.
func Decode(data []byte) (Configuration, error) {
	file, err := decode(data)
	if err != nil {
		return Configuration{}, err
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
func (f fileJSON) parse() (c Configuration, _ error) {
	var errs []error
	check := func(key string, err error) {
		if err != nil {
			errs = append(errs, keyError{key, err})
		}
	}
	check("apiVersion", mustBe(f.APIVersion, APIVersion))
	check("kind", mustBe(f.Kind, Kind))
	if f.MemoryUnit != nil {
		unit, err := gpu.ParseUnit(*f.MemoryUnit)
		check("memoryUnit", err)
		c.Unit = &unit
	}
	for i, s := range f.ExcludedCards {
		selector, err := s.parse()
		check(fmt.Sprintf("excludedCards[%d]", i), err)
		c.Excluded = append(c.Excluded, selector)
	}
	if f.CardMemory != nil {
		memory, err := inventory.NewCardMemory(f.CardMemory.All, f.CardMemory.ByUUID)
		check("cardMemory", err)
		c.CardMemory = &memory
	}
	if f.Isolation != nil {
		mode, err := isolation.ParseMode(*f.Isolation)
		check("isolation", err)
		c.Isolation = &mode
	}
	var err error
	c.DisabledXids, err = parseXids(f.HealthChecks.DisabledXids)
	check("healthChecks.disabledXids", err)
	c.EnabledXids, err = parseXids(f.HealthChecks.EnabledXids)
	check("healthChecks.enabledXids", err)
	if f.HealthChecks.QuietPeriod != nil {
		period, err := time.ParseDuration(*f.HealthChecks.QuietPeriod)
		if err == nil && period <= 0 {
			err = fmt.Errorf("must be positive, got %v", period)
		}
		check("healthChecks.quietPeriod", err)
		c.QuietPeriod = &period
	}
	if len(errs) > 0 {
		return Configuration{}, errors.Join(errs...)
	}
	return c, nil
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

// parseXids returns nil for a list that isn't given. Other than a flag's list, it must have no unknown words.
func parseXids(list []intstr.IntOrString) (*inventory.XidSet, error) {
	if list == nil {
		return nil, nil
	}
	var words []string
	for _, x := range list {
		if x.Type == intstr.Int && x.IntVal < 1 {
			return nil, fmt.Errorf("a Xid is a number above 0, got %d", x.IntVal)
		}
		words = append(words, x.String())
	}
	set, malformed := inventory.ParseXids(strings.Join(words, ","))
	if slices.Contains(words, "") {
		malformed = append(malformed, "")
	}
	if len(malformed) > 0 {
		return nil, fmt.Errorf("%s is neither the number of a Xid nor all", strconv.Quote(malformed[0]))
	}
	return &set, nil
}
