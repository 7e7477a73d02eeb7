package eligibility

// Resources returns the resources that are counted.
func (c *Capacity) Resources() Resources { return c.resources }
