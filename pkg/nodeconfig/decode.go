package nodeconfig

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"
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

// Decode reads a file's content. Unknown and repeated keys are errors. If the keys are right, the error names every wrong value.
func Decode(data []byte) (Configuration, error) {
	var file fileJSON
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return Configuration{}, err
	}
	return file.parse()
}

// parse checks and converts the values. It returns all errors.
func (f fileJSON) parse() (c Configuration, _ error) {
	var errs []error
	check := func(key string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
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
